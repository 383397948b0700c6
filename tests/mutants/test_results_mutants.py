"""A result of input without end that nobody refuses is caught (N40)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.api import test_endless_results as results
from tests.mutants.harness import assert_caught, patched

from headgate.connectors.generator import Generator


def test_a_generator_that_claims_to_end_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.Pipeline.start", lambda self, **_: 1 / 0)
    assert_caught(
        lambda: patched(Generator, "how_to_end", lambda self: None),
        results.test_results_of_input_without_end_are_refused,
        tmp_path,
        results.CALLS[0],
        results.generated,
        "numbers",
        "rows=",
    )
