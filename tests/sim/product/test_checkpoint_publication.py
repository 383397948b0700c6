"""A function that publishes on completion, in the machine room: sound code passes, and what is wrong is seen."""

from __future__ import annotations

from typing import Any

import pytest
from tests.conftest import IS_DEEP

from headgate.sim.machine.world import Violation
from headgate.sim.product.checkpoint_publication import Outside, Publisher
from headgate.sim.product.run import Run

SMOKE = (27, 77, 145, 146, 209, 214) if IS_DEEP else (77, 145)


def test_seeds_publish_what_they_read() -> None:
    runs = {seed: Run(seed) for seed in SMOKE}
    assert [(seed, str(found)) for seed, run in runs.items() if (found := run.run())] == []
    outside = runs[145].settings.outside
    assert outside is not None
    assert len(outside.published) > 100
    assert len(set(outside.published.values())) > 2, "several generations had a part in it"
    assert len(outside.kept) > 5


def test_seeds_that_do_not_publish_are_what_they_were() -> None:
    assert not Outside(0, *_parts(Run(0))).is_drawn
    assert Run(0).settings.outside is None
    assert Run(27, is_plain=True).settings.outside is None


def _parts(run: Run) -> tuple[Any, ...]:
    return run.tasks, run.faults, lambda: run.history


@pytest.fixture
def outside() -> Outside:
    return Outside(4, *_parts(Run(4)))


def test_copies_of_a_function_publish_to_one_world(outside: Outside) -> None:
    from headgate.operators.user_functions import copied

    function = Publisher(outside, "publish0")
    found = copied("publish0", function)
    assert found is not function
    assert found.outside is outside


@pytest.mark.parametrize(
    ("rows", "published", "kept", "said"),
    [
        ([1, 2], [1], [1, 2], r"1 rows are not public \[2\]"),
        ([1], [1, 2], [1], r"1 were not read \[2\]"),
        ([1, 2], [1, 2], [1], r"lack \[2\]"),
        ([1], [1], [1, 1], r"have \[1\] too often"),
    ],
)
def test_what_is_not_public_or_not_read_is_a_violation(
    outside: Outside, rows: list[int], published: list[int], kept: list[int], said: str
) -> None:
    outside.published = dict.fromkeys(published, "w")
    outside.kept = {7: {("publish0", 0): kept}}
    with pytest.raises(Violation, match=said):
        outside.check([{"n": n} for n in rows], 7)


def test_what_a_restart_took_back_must_not_be_public(outside: Outside) -> None:
    outside._published(1, "a worker")
    outside._published(1, "a worker")
    assert outside._history().finding is None
    outside._published(1, "its successor")
    assert "a restart took it back" in str(outside._history().finding)


@pytest.mark.parametrize(("checkpoint", "before", "said"), [(9, 0, "the log has none"), (1, 1, "behind 1")])
def test_a_completion_that_is_none_is_a_violation(outside: Outside, checkpoint: int, before: int, said: str) -> None:
    outside._history().written[1, 1] = object()  # type: ignore[assignment]
    outside.completed("publish0", checkpoint, before)
    assert said in str(outside._history().finding)


def test_an_abort_of_what_was_completed_is_a_violation(outside: Outside) -> None:
    outside.aborted("publish0", 1)
    assert outside._history().finding is None
    outside._history().completed[1] = 1
    outside.aborted("publish0", 1)
    assert "it was completed" in str(outside._history().finding)
