"""``dataclass`` of the standard library, at a tenth of its cost: a process that starts makes hundreds of them.

The standard one compiles six methods for each class. Here the constructor, ``==`` and the hash are compiled when they
are called for the first time, and every other method is one function for all classes. The rest, such as fields and
slots, is the standard one's work; type checkers see the standard one. There is no ``InitVar`` here.

A class that users call is the standard one's: errors read the signature of its constructor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from inspect import Parameter, Signature
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, TypeAlias

Source: TypeAlias = tuple[str, str, dict[str, Any]]
"""The parameters of a method, its body in one line, and the values of the names in them."""

_COMPARISONS = {"__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">="}


def _dataclass(
    kind: type | None = None,
    /,
    *,
    frozen: bool = False,
    eq: bool = True,
    order: bool = False,
    kw_only: bool = False,
    slots: bool = False,
) -> Any:
    """Make a dataclass of ``kind``, with the standard library's meaning of each option."""

    def make(kind: type) -> type:
        kind.__doc__ = kind.__doc__ or kind.__name__  # else the standard one writes the signature there
        derives = any(dataclasses.is_dataclass(base) for base in kind.__bases__)
        standard = dataclasses.dataclass(
            init=False, repr=False, eq=False, frozen=frozen and derives, kw_only=kw_only, slots=slots
        )
        made: type = standard(kind)
        vars(made)["__dataclass_params__"].frozen = frozen  # so that the standard one refuses to derive others
        if "__init__" not in vars(made):
            _add(made, "__init__", _compiled_later(made, "__init__", lambda: _constructor(made, frozen)))
            _add(made, "__signature__", _SIGNATURE)
        _add(made, "__repr__", _repr)
        if eq:
            _add_comparisons(made, frozen, order)
        if frozen:
            _add(made, "__setattr__", _refuse_assignment)
            _add(made, "__delattr__", _refuse_deletion)
            if slots:
                _add(made, "__getstate__", _state)
                _add(made, "__setstate__", _set_state)
        return made

    return make if kind is None else make(kind)


def _add(kind: type, name: str, method: object) -> None:
    if name not in vars(kind):
        setattr(kind, name, method)


# -- methods that are compiled ----------------------------------------------------------------------------------------


def _compiled_later(kind: type, name: str, source: Callable[[], Source]) -> Callable[..., Any]:
    """Return what stands for a method until it is called; threads may call it at the same time."""

    def first_call(self: Any, /, *values: Any, **named: Any) -> Any:
        parameters, body, scope = source()
        exec(f"def {name}({parameters}): {body}", scope)
        method: Callable[..., Any] = scope[name]
        method.__qualname__, method.__module__ = f"{kind.__qualname__}.{name}", kind.__module__
        setattr(kind, name, method)
        return method(self, *values, **named)

    return first_call


def _constructor(kind: type, is_frozen: bool) -> Source:
    """Return a constructor with a parameter for each field, in the order of the fields."""
    scope: dict[str, Any] = {"_set": object.__setattr__, "_MISSING": MISSING}
    by_position, by_name, steps = ["self"], ["*"], ["pass"]
    for field in fields(kind):
        name = field.name
        parameter = _parameter(field, scope)
        if field.init:
            (by_name if field.kw_only else by_position).append(parameter)
        if (value := _value(field, scope)) is not None:
            steps.append(f"_set(self, {name!r}, {value})" if is_frozen else f"self.{name} = {value}")
    if hasattr(kind, "__post_init__"):
        steps.append("self.__post_init__()")
    return ", ".join([*by_position, *(by_name if len(by_name) > 1 else ())]), "; ".join(steps), scope


def _parameter(field: Field[Any], scope: dict[str, Any]) -> str:
    is_missing = _is_missing(field.default)
    if is_missing and _is_missing(field.default_factory):
        return field.name
    scope[f"_default_{field.name}"] = MISSING if is_missing else field.default  # missing if made for each object
    return f"{field.name}=_default_{field.name}"


def _value(field: Field[Any], scope: dict[str, Any]) -> str | None:
    """Return the expression for the value of a field; None: it is not set by the constructor."""
    if not _is_missing(field.default_factory):
        scope[f"_make_{field.name}"] = field.default_factory
        made = f"_make_{field.name}()"
        return f"{made} if {field.name} is _MISSING else {field.name}" if field.init else made
    if field.init:
        return field.name
    return None if _is_missing(field.default) else f"_default_{field.name}"


def _is_missing(value: object) -> bool:
    """Whether it is ``MISSING``, or a copy of it, as a class that was pickled by value has."""
    return isinstance(value, type(MISSING))


def _add_comparisons(kind: type, is_frozen: bool, is_ordered: bool) -> None:
    compared = [field.name for field in fields(kind) if field.compare]
    own_hash = "__hash__" in vars(kind) and ("__eq__" not in vars(kind) or kind.__hash__ is not None)
    for name, operator in {"__eq__": "==", **(_COMPARISONS if is_ordered else {})}.items():
        _add(kind, name, _compiled_later(kind, name, lambda operator=operator: _comparison(compared, operator)))  # type: ignore[misc]
    if not own_hash:
        hashed = [field.name for field in fields(kind) if (field.compare if field.hash is None else field.hash)]
        later = _compiled_later(kind, "__hash__", lambda: ("self", f"return hash({_values('self', hashed)})", {}))
        kind.__hash__ = later if is_frozen else None  # type: ignore[assignment]


def _comparison(names: Iterable[str], operator: str) -> Source:
    mine, others = _values("self", names), _values("other", names)
    body = f"return {mine} {operator} {others} if other.__class__ is self.__class__ else NotImplemented"
    return "self, other", body, {}


def _values(owner: str, names: Iterable[str]) -> str:
    return f"({''.join(f'{owner}.{name},' for name in names)})"


class _Signature:
    """What ``inspect.signature`` shows of a class. It is made when it is asked for, and is not that of its objects."""

    def __get__(self, instance: object, kind: type) -> Signature:
        if instance is not None or "__dataclass_fields__" not in vars(kind):
            raise AttributeError("__signature__")
        parameters = []
        for field in sorted(fields(kind), key=lambda field: bool(field.kw_only)):
            if field.init:
                how = Parameter.KEYWORD_ONLY if field.kw_only else Parameter.POSITIONAL_OR_KEYWORD
                default = field.default if _is_missing(field.default_factory) else field.default_factory
                default = Parameter.empty if _is_missing(default) else default
                parameters.append(Parameter(field.name, how, default=default, annotation=field.type))
        return Signature(parameters, return_annotation=None)


_SIGNATURE = _Signature()


# -- methods that are the same for all classes ------------------------------------------------------------------------


@recursive_repr()
def _repr(self: Any) -> str:
    shown = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr]
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse_assignment(self: Any, name: str, value: object) -> None:
    if _is_kept(self, name):
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _refuse_deletion(self: Any, name: str) -> None:
    if _is_kept(self, name):
        raise FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _is_kept(self: Any, name: str) -> bool:
    """Whether the attribute is that of a frozen class: one that derives from it and is no dataclass has its own."""
    return "__dataclass_fields__" in vars(type(self)) or any(field.name == name for field in fields(self))


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in fields(self)]


def _set_state(self: Any, state: Sequence[Any]) -> None:
    for field, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    dataclass = _dataclass
