"""What holds for every planted bug: it ends with the test that it was planted for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.mutants.harness import left_behind


@pytest.fixture(autouse=True)
def _no_planted_bug_outlives_its_test() -> Iterator[None]:
    left_behind()
    yield
    assert left_behind() == [], "tests behind this one meet a planted bug"
