"""Calls with a wrong argument: a sentence with the right names, instead of a TypeError that names internals.

``checked_calls`` wraps what users call while they build, start and look at pipelines and streams. What a function of
theirs calls for each record is left alone, because a wrapper would cost it time.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headgate.errors import UsageError

_TITLES: dict[type, str] = {}
"""What users call the classes that they call."""

_MARK = "_headgate_checks_calls"

OPTIONS_TO_COME = {
    "lateness": "it is window(..., allowed_lateness=...)",
}
"""Options that people try, of all classes or of one, and what happens or what to do today."""


class WrongCallError(UsageError):
    """A call with a wrong argument; ``argument`` is its name, or ""."""

    def __init__(self, message: str, argument: str = "") -> None:
        super().__init__(message)
        self.args = (message, argument)
        self.argument = argument

    def __str__(self) -> str:
        return self.message


def checked_calls(kind: type, title: str = "") -> None:
    """Have the constructor and the public methods of ``kind`` say in a sentence what is wrong with a call.

    Also those that it inherits from classes of Headgate's. ``title``: what users call it, if not by its name.
    """
    _TITLES[kind] = title or kind.__name__
    for owner in kind.__mro__:
        if owner.__module__.startswith("headgate.") and _MARK not in vars(owner):
            for name, value in list(vars(owner).items()):
                if name == "__init__" or not name.startswith("_"):
                    _wrap(owner, name, value)
            setattr(owner, _MARK, True)


def hide_internals(kind: type) -> None:
    """Have Python's own error name no internal class that ``kind`` inherits a method from. It costs calls no time."""
    for owner in kind.__mro__:
        if owner.__module__.startswith("headgate.") and owner.__name__.startswith("_"):
            for name, value in vars(owner).items():
                if inspect.isfunction(value):
                    value.__qualname__ = name


def checked_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which says in a sentence what is wrong with a call."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*arguments: Any, **options: Any) -> Any:
            problem = _problem(function, arguments, options)
            if problem is not None:
                raise problem
            return await function(*arguments, **options)

        return awaited

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except (TypeError, WrongCallError) as error:
            problem = _problem(function, arguments, options, error)
            if problem is None:
                raise
        raise problem

    return called


def _wrap(owner: type, name: str, value: object) -> None:
    if isinstance(value, (classmethod, staticmethod)):
        setattr(owner, name, type(value)(checked_call(value.__func__)))
    elif inspect.isfunction(value):
        setattr(owner, name, checked_call(value))


def _problem(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
    error: TypeError | WrongCallError | None = None,
) -> WrongCallError | None:
    """Return what is wrong with the call; None if nothing is, so that ``error`` has another cause."""
    signature = inspect.signature(function)
    known = _options_of(function, signature)
    title = _title(function, arguments)
    for name in options:
        if known is not None and name not in known:
            return _unknown(title, name, known)
    try:
        signature.bind(*arguments, **options)
    except TypeError as wrong:
        return _misfit(title, signature, str(wrong))
    unknown = error.argument if isinstance(error, WrongCallError) else _refused_below(str(error))
    if unknown in options and unknown not in signature.parameters:
        return _unknown(title, unknown, known or _named(signature))
    return None


def _named(signature: inspect.Signature) -> list[str]:
    """Return the names of all parameters that may be given by name."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, one in signature.parameters.items() if one.kind in kinds and name not in ("self", "cls")]


def _options_of(function: Callable[..., Any], signature: inspect.Signature) -> list[str] | None:
    """Return all names that ``function`` takes; None if it passes on any."""
    names = _named(signature)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
            declared = None if found is None else inspect.unwrap(function).__globals__.get(found[1])
            if declared is None:
                return None
            names += list(declared.__annotations__)
    return names


def _title(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Return what the user called, by its public name."""
    *owners, name = function.__qualname__.split(".")
    if not owners or owners[-1] == "<locals>":
        return f"{name}()"
    kinds = () if not arguments else (arguments[0] if isinstance(arguments[0], type) else type(arguments[0])).__mro__
    of_users = (kind for kind in kinds if kind in _TITLES or not kind.__module__.startswith("headgate."))
    kind = next(of_users, object)
    title = _TITLES.get(kind, kind.__name__)
    if name == "__init__":
        return f"{title}()"
    return f"{name}()" if kind in (object, type(None)) else f"{title}.{name}()"


def _unknown(title: str, name: str, known: Iterable[str]) -> WrongCallError:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    to_come = OPTIONS_TO_COME.get(name, OPTIONS_TO_COME.get(f"{title.removesuffix('()')}.{name}"))
    if to_come is not None and not near:
        return WrongCallError(f"{title}: {name}= is not there yet; {to_come}", name)
    if near:
        return WrongCallError(f"{title} has no option '{name}'; did you mean '{near[0]}'?", name)
    what = f"its options are {', '.join(names)}" if names else "it takes none"
    return WrongCallError(f"{title} has no option '{name}'; {what}", name)


def _misfit(title: str, signature: inspect.Signature, said: str) -> WrongCallError:
    """Return what ``inspect`` says, as a sentence about the user's call."""
    name = next(iter(re.findall(r"'(\w+)'", said)), "")
    if said.startswith("got an unexpected keyword"):
        return _unknown(title, name, _named(signature))
    if said.startswith("missing"):
        return WrongCallError(f"{title} needs {name}")
    if said.startswith("multiple values"):
        return WrongCallError(f"{title} was given {name} twice: by position and by name", name)
    by_position = [
        one.name
        for one in signature.parameters.values()
        if one.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        and one.name not in ("self", "cls")
    ]
    by_name = [one.name for one in signature.parameters.values() if one.kind is inspect.Parameter.KEYWORD_ONLY]
    takes = f"only {', '.join(by_position)}" if by_position else "nothing"
    others = f"; give options by name, such as {by_name[0]}=..." if by_name else ""
    return WrongCallError(f"{title} takes {takes} by position{others}")


def _refused_below(said: str) -> str:
    """Return the argument that a function further down did not know, "" if it is about something else."""
    found = re.search(r"got an unexpected keyword argument '(\w+)'", said)
    return found[1] if found else ""
