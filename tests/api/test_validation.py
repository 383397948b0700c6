"""Which guarantee a pipeline asks for, and what is refused under it."""

from __future__ import annotations

from typing import Any

import pytest

import headgate as hg
from headgate.connectors.base import Sink
from headgate.model.config import Alignment, DamagedCheckpoint, Guarantee


def made(mode: str, **options: Any) -> hg.Pipeline:
    return hg.Pipeline("p", checkpointing=hg.Checkpointing(mode=mode), **options)


@pytest.mark.parametrize("mode", list(Guarantee))
def test_the_mode_of_a_pipeline_is_configured_by_name(mode: Guarantee) -> None:
    for text in (mode.value, mode.value.replace("_", "-")):
        pipeline = made(text)
        pipeline.source(hg.Generator(rows=1)).sink(hg.Discard())
        assert pipeline.definition().config.checkpoints.mode is mode
    assert hg.Checkpointing().to_config().mode is Guarantee.EXACTLY_ONCE


def test_another_mode_is_refused_with_those_there_are() -> None:
    for wrong in ("twice", 1, None):
        with pytest.raises(hg.UsageError, match="must be one of 'exactly_once', 'at_least_once', 'at_most_once', not"):
            hg.Checkpointing(mode=wrong)  # type: ignore[arg-type]


def looped(mode: str, **rounds: Any) -> hg.Pipeline:
    pipeline = made(mode)
    stream = pipeline.source(hg.Generator(rows=1))
    stream.iterate(lambda loop: (loop.filter(lambda row: False), loop), **rounds).sink(hg.Discard())
    return pipeline


@pytest.mark.parametrize("rounds", [{"max_rounds": 3}, {"round_column": "r"}, {"on_round": print}])
def test_a_loop_that_counts_rounds_is_refused_at_least_once(rounds: dict[str, Any]) -> None:
    looped("exactly_once", **rounds).definition()
    looped("at_least_once").definition()
    with pytest.raises(hg.UsageError, match="counts rounds, which begin when all input has ended") as refused:
        looped("at_least_once", **rounds).definition()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("interval", [None, 0])
def test_at_most_once_needs_an_interval(interval: Any) -> None:
    with pytest.raises(hg.UsageError, match="needs an interval; give"):
        hg.Checkpointing(mode="at_most_once", interval=interval)


def test_a_loop_is_refused_at_most_once() -> None:
    with pytest.raises(hg.UsageError, match="what circulates is in the checkpoint and is processed again"):
        looped("at_most_once").definition()


# GM35
def test_going_back_is_refused_at_most_once() -> None:
    going_back = made("at_most_once", on_damaged_checkpoint="previous")
    going_back.source(hg.Generator(rows=1)).sink(hg.Discard())
    with pytest.raises(hg.UsageError, match="reads again what was read since the earlier checkpoint"):
        going_back.definition()
    unsaid = made("at_most_once")
    unsaid.source(hg.Generator(rows=1)).sink(hg.Discard())
    assert unsaid.definition().config.on_damaged is DamagedCheckpoint.FAIL, "though nothing is committed"


def test_a_pause_between_checkpoints_that_overlap_is_refused() -> None:  # C4
    hg.Checkpointing(min_pause="1s")
    hg.Checkpointing(max_concurrent=2)
    with pytest.raises(hg.UsageError, match="max_concurrent=2 lets them overlap; give one of them"):
        hg.Checkpointing(min_pause="1s", max_concurrent=2)


def test_an_alignment_timeout_needs_exactly_once_and_one_checkpoint_at_a_time() -> None:
    assert hg.Checkpointing().to_config().alignment_timeout_ms is None
    assert hg.Checkpointing(alignment_timeout=0).to_config().alignment_timeout_ms == 0
    timed = hg.Checkpointing(alignment_timeout="1s").to_config()
    assert (timed.alignment_timeout_ms, timed.alignment) == (1_000, Alignment.TIMED)
    for mode in ("at_least_once", "at_most_once"):
        with pytest.raises(hg.UsageError, match=f"for mode='exactly_once'; mode='{mode}' does not need it") as refused:
            hg.Checkpointing(alignment_timeout="1s", mode=mode)
        assert "\n" not in str(refused.value)
    with pytest.raises(hg.UsageError, match="max_concurrent=2 would store those twice; give one of them"):
        hg.Checkpointing(alignment_timeout=0, max_concurrent=2)
    with pytest.raises(hg.UsageError, match="checkpointing alignment_timeout must look like"):
        hg.Checkpointing(alignment_timeout="soon")
    with pytest.raises(hg.UsageError, match="unaligned checkpoints are no mode: give"):
        hg.Checkpointing(mode="unaligned")


def test_checkpoints_are_retained_unless_somebody_says_otherwise() -> None:  # C32
    config = hg.Checkpointing().to_config()
    assert (config.retain_on_cancel, config.retain_on_failure) == (True, True)
    config = hg.Checkpointing(retain_on_cancel=False, retain_on_failure=False).to_config()
    assert (config.retain_on_cancel, config.retain_on_failure) == (False, False)
    with pytest.raises(hg.UsageError, match="checkpointing retain_on_cancel= must be True or False, not 'delete'"):
        hg.Checkpointing(retain_on_cancel="delete")  # type: ignore[arg-type]


class Publishing(hg.PublishOnCheckpoint):
    item_type = int

    def __call__(self, row: dict[str, int]) -> dict[str, int]:
        return row

    def publish(self, items: list[int]) -> None:
        """Nowhere."""


@pytest.mark.parametrize("option", ["retain_on_cancel", "retain_on_failure"])
def test_what_waits_to_be_published_is_not_removed(option: str) -> None:
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(**{option: False}))
    pipeline.source(hg.FromRows([{"n": 1}])).map(Publishing(), name="publishes").sink(hg.Discard())
    with pytest.raises(hg.UsageError, match=f"operator 'publishes' acts when .* leave {option} out of Checkpointing"):
        pipeline.definition()


class Confirming(hg.CoordinatorHook, hg.CheckpointListener):
    def trigger(self, checkpoint_id: int) -> bytes:
        return b"what is confirmed once the checkpoint is completed"

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        """It is completed: confirm."""

    def reset(self) -> None:
        """Nothing to confirm."""


class Tidying(Confirming):
    is_listening = False


@pytest.mark.parametrize("option", ["retain_on_cancel", "retain_on_failure"])
def test_what_a_hook_has_yet_to_do_is_not_removed(option: str) -> None:
    def made(hook: hg.CoordinatorHook, **options: bool) -> hg.Pipeline:
        pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(**options))
        pipeline.source(hg.FromRows([{"n": 1}])).sink(hg.Discard())
        pipeline.add_hook("confirms", hook)
        return pipeline

    with pytest.raises(hg.UsageError, match=f"hook 'confirms' acts when .* leave {option} out of Checkpointing"):
        made(Confirming(), **{option: False}).definition()
    made(Confirming()).definition()
    made(Tidying(), **{option: False}).definition()


class Ends(hg.TwoPhaseSink[None]):
    """A sink whose target ends transactions after a minute."""

    transaction_timeout = "1m"

    def begin(self, name: str, schema: Any) -> None: ...

    def write(self, transaction: None, batch: Any) -> None: ...

    def prepare(self, transaction: None, name: str, fence: hg.Fence) -> None: ...

    def claim(self, fence: hg.Fence) -> None: ...

    def prepared(self, owner: str) -> list[str]:
        return []

    def commit(self, names: Any, fence: hg.Fence) -> None: ...

    def abort(self, name: str, fence: hg.Fence) -> None: ...


QUICKLY = hg.FixedDelay(delay="10s")
"""As long as a takeover."""


@pytest.mark.parametrize(
    ("checkpointing", "found"),
    [
        (hg.Checkpointing(interval="10s", timeout="39s"), None),
        (hg.Checkpointing(interval="10s", timeout="40s"), "and a restart after it may take 60000 ms"),
        (hg.Checkpointing(interval="10s", timeout="35s", min_pause="10s"), "and a restart after it may take 65000 ms"),
        (hg.Checkpointing(interval="10s", timeout="10s", tolerable_failures=1), None),
        (
            hg.Checkpointing(interval="10s", timeout="10s", tolerable_failures=2),
            "and a restart after it may take 70000 ms",
        ),
        (hg.Checkpointing(), "and a restart after it may take 611000 ms"),
        (hg.Checkpointing(interval=None, timeout="1s"), "has no interval"),
    ],
)
def test_a_target_that_may_end_what_a_checkpoint_still_needs_is_refused(
    checkpointing: hg.Checkpointing, found: str | None
) -> None:  # CS9
    pipeline = hg.Pipeline("p", checkpointing=checkpointing, restart=QUICKLY)
    pipeline.source(hg.Generator(rows=1)).sink(Ends(), name="out")
    if found is None:
        pipeline.definition()
        return
    with pytest.raises(
        hg.UsageError, match=rf"sink 'out' writes .* after 60000 ms, and a checkpoint {found}: output would be lost"
    ):
        pipeline.definition()


@pytest.mark.parametrize(
    ("restart", "needed_ms"),
    [
        (hg.NoRestart(), None),
        (hg.FixedDelay(), None),
        (hg.FixedDelay(delay="29s"), None),
        (hg.FixedDelay(delay="30s"), 60_000),
        (hg.FailureRate(delay="40s"), 70_000),
        (hg.ExponentialDelay(maximum="25s"), None),
        (hg.ExponentialDelay(maximum="28s"), 60_800),
        (hg.ExponentialDelay(), 96_000),
    ],
    ids=repr,
)
def test_restarts_and_takeovers_count_against_what_a_target_waits(
    restart: hg.RestartStrategy, needed_ms: int | None
) -> None:  # CS9
    def made(timeout: str) -> hg.Pipeline:
        pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(interval="10s", timeout=timeout), restart=restart)
        pipeline.source(hg.Generator(rows=1)).sink(Ends(), name="out")
        return pipeline

    if needed_ms is None:
        made("20s").definition()
    else:
        with pytest.raises(hg.UsageError, match=f"a restart after it may take {needed_ms} ms"):
            made("20s").definition()
    with pytest.raises(hg.UsageError, match="a restart after it may take"):
        made("40s").definition()  # whatever the strategy is, a driver may die, and another one takes over


class Unowned(Sink):
    """A sink that a user wrote from nothing, and that keeps what it writes."""


class Owned(Unowned):
    has_owner = True


class AtOnce(Unowned):
    is_transactional = False


def test_a_sink_that_cannot_say_whose_its_target_is_is_refused() -> None:
    def made(sink: Any, **options: Any) -> hg.Pipeline:
        pipeline = hg.Pipeline("p", **options)
        pipeline.source(hg.FromRows([{"n": 1}])).sink(sink, name="out")
        return pipeline

    with pytest.raises(
        hg.UsageError, match=r"sink 'out': Unowned cannot say .* owner, own and how_to_forget"
    ) as refused:
        made(Unowned()).definition()
    assert "\n" not in str(refused.value)
    for sink in (Owned(), AtOnce()):
        made(sink).definition()
    with pytest.raises(hg.UsageError, match="Unowned cannot say"):
        made(hg.Discard(), bad_records=hg.DeadLetter(Unowned())).definition()
