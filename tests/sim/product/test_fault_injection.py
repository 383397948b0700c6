"""Seeds with a subject meet it; values of many types come through; a neighbour in the store notices what it loses."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.mutants.harness import patched

from headgate.sim.product.fault_injection import FOCUS_RATE, SUBJECTS, draw_focus
from headgate.sim.product.run import Run
from headgate.sim.product.workloads import TYPED
from headgate.sim.streams.background_traffic import BackgroundTraffic
from headgate.sim.streams.streams import StreamRun
from headgate.store import writer

OF_DAMAGE, OF_DECLINES, OF_OVERLAPS = 18, 7, 1
QUICK_TYPED = {
    157: "odd-keys",
    137: "odd-batches",
    111: "float-key",
    117: "day-key",
    105: "measured",
    155: "buffered",
}
"""A seed for each of ``typed.TYPED``."""


def test_seeds_draw_their_subjects_apart_from_everything_else() -> None:
    drawn = [draw_focus(seed) for seed in range(2_000)]
    titles = Counter(focus.title for focus in drawn if focus is not None)
    assert set(titles) == {focus.title for focus in SUBJECTS}
    assert abs(titles.total() / 2_000 - FOCUS_RATE) < 0.05
    assert drawn[:20] == [draw_focus(seed) for seed in range(20)]


@pytest.mark.parametrize(
    ("seed", "title", "met"),
    [
        (OF_DAMAGE, "damage", "cannot be used: "),
        (OF_DECLINES, "checkpoints that end otherwise than well", "declined: "),
        (OF_OVERLAPS, "checkpoints that overlap and expire", "did not complete within its timeout"),
    ],
)
def test_a_seed_meets_its_subject(seed: int, title: str, met: str) -> None:
    run = Run(seed, is_traced=True)
    assert run.focus is not None
    assert run.focus.title == title
    assert run.run() is None
    assert any(met in line for line in run.world.story)


def test_every_kind_of_typed_workload_has_a_seed() -> None:
    assert sorted(QUICK_TYPED.values()) == sorted(workload.name for workload in TYPED)


@pytest.mark.parametrize("seed", QUICK_TYPED)
def test_keys_and_measures_of_many_types_come_through(seed: int) -> None:
    run = Run(seed)
    assert QUICK_TYPED[seed] in run.settings.job.columns
    assert run.run() is None


def test_a_neighbour_notices_what_the_store_should_have_refused() -> None:
    with patched(writer, "check_events", lambda stream, batch: None):
        assert any("should have refused" in str(StreamRun(seed).run()) for seed in (6, *range(40)))


def test_a_neighbour_notices_what_is_lost() -> None:
    def forgetful(self: BackgroundTraffic, rows_count: int, *, is_there: bool = True) -> object:
        if is_there:
            self._expected[-1] += 1  # told of it, and it is nowhere
        return real(self, rows_count, is_there=is_there)

    real = BackgroundTraffic._batch
    with patched(BackgroundTraffic, "_batch", forgetful):
        assert any("next-door/events lost [-1]" in str(StreamRun(seed).run()) for seed in (2, *range(10)))
