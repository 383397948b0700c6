"""Tests of the store that are repeated with its catalogue elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

PARAMETERS = 3
"""With so many of its parameters a test is repeated by ``make test``; with the others by ``make test-deep``."""


def leave_repetitions(items: Iterable[pytest.Item]) -> None:
    """Mark further parameters of tests that are written in another module, but for verbs: each one has its own SQL."""
    repeated: dict[object, list[pytest.Function]] = {}
    for item in items:
        assert isinstance(item, pytest.Function)
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if params and "verb" not in params and item.function.__module__ != item.module.__name__:
            repeated.setdefault(item.function, []).append(item)
    for found in repeated.values():
        for item in sorted(found, key=lambda item: item.name)[PARAMETERS:]:
            item.add_marker("deep")
