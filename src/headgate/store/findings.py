"""What a check of a store finds: each thing that is wrong in a sentence, and the rest is checked all the same.

Counterparts: ``fsck`` and ``catalogue.audit``. Source: S40 of docs/spec/stream-store.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeAlias

from headgate.errors import HeadgateError

Found: TypeAlias = list[tuple[str, str]]
"""Where something is wrong, and what."""

NONSENSE = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError, MemoryError)
"""What code raises that trips over a value which is never there."""

_P = ParamSpec("_P")


def checked(where: str, check: Callable[_P, Iterable[str]], *of: _P.args, **named: _P.kwargs) -> Found:
    """Return what ``check`` finds; what it trips over is found, too: nothing else is left unchecked for it."""

    def found() -> Found:
        return [(where, problem) for problem in check(*of, **named)]

    return checked_at(where, found)


def checked_at(where: str, check: Callable[_P, Found], *of: _P.args, **named: _P.kwargs) -> Found:
    """Do what ``checked`` does, where ``check`` says itself where each problem is."""
    try:
        return check(*of, **named)
    except HeadgateError as error:
        return [(where, str(error))]
    except NONSENSE as error:
        return [(where, f"cannot be checked, what is recorded makes no sense ({type(error).__name__}: {error})")]
