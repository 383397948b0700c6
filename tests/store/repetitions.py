"""Tests of the store that are repeated with its catalogue elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

PARAMETERS = 2
"""With so many of its parameters a test is repeated by ``make test``; with the others by ``make test-repeated``."""


def leave_repetitions(items: Iterable[pytest.Item], modules: Collection[str]) -> None:
    """Leave to ``make test-repeated`` what is repeated in ``modules``, and further parameters of the other tests.

    Verbs are not left out: each one has its own SQL.
    """
    repeated: dict[object, list[pytest.Function]] = {}
    for item in items:
        assert isinstance(item, pytest.Function)
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.stem in modules:
            item.add_marker("deep")
        elif params and "verb" not in params and item.function.__module__ != item.module.__name__:
            repeated.setdefault(item.function, []).append(item)
    for found in repeated.values():
        for item in sorted(found, key=lambda item: item.name)[PARAMETERS:]:
            item.add_marker("deep")
