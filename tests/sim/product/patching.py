"""How planted bugs change a class: ``tests.mutants.harness.patched`` with the original at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from inspect import isfunction
from typing import Any

from tests.mutants.harness import patched

Mutant = Callable[[], AbstractContextManager[None]]


def around(owner: object, name: str, change: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replace a function or method by ``change(original, *arguments)``; a method's first argument is ``self``."""
    original = getattr(owner, name)
    return patched(owner, name, lambda *a, **options: change(original, *a, **options))


def skipped(owner: object, name: str, result: object = None) -> AbstractContextManager[None]:
    """Have a function or method do nothing but return ``result``."""
    return patched(owner, name, lambda *a, **options: result)


def without(owner: object, name: str, kinds: type | tuple[type, ...]) -> AbstractContextManager[None]:
    """Drop effects of ``kinds`` from what a method of a machine returns."""
    return around(owner, name, lambda call, *a: [effect for effect in call(*a) if not isinstance(effect, kinds)])


@contextmanager
def both(first: AbstractContextManager[None], second: AbstractContextManager[None]) -> Iterator[None]:
    """Plant two."""
    with first, second:
        yield


def planted(names: Mapping[str, Any], module: str) -> tuple[Mutant, ...]:
    """Return the public functions without arguments that ``module`` defines: its planted bugs, in order."""
    found = (value for name, value in names.items() if not name.startswith("_") and isfunction(value))
    return tuple(value for value in found if value.__module__ == module)
