"""Has a module or class have another bound for the time of a run: what happens to large state happens to small, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

Bound: TypeAlias = tuple[object, str, object]
"""A module or class, the name of what it has, and what it has instead."""


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Have ``owner`` have ``value`` instead of what it usually has."""
    usual = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, usual)
