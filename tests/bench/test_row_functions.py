"""Row functions: the functions that are measured do what their names say, and the pipelines can be built."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.row_functions import VERBS, added, doubled, pipeline


def test_the_functions_compute_and_leave_their_arguments_alone() -> None:
    row, accumulator = {"key": 1, "value": 3}, {"key": 1, "value": 4}
    assert doubled(row) == {"key": 1, "value": 6}
    assert added(accumulator, row) == {"key": 1, "value": 7}
    assert (row, accumulator) == ({"key": 1, "value": 3}, {"key": 1, "value": 4})


@pytest.mark.parametrize("verb", VERBS)
def test_the_measured_node_is_in_the_pipeline(verb: str, tmp_path: Path) -> None:
    definition = pipeline(verb, 2, 10, str(tmp_path)).definition()
    assert verb in [str(node.name) for node in definition.graph.nodes]
    assert definition.config.parallelism == 2
