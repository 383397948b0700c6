"""Streams that are scaled by their policy: what is observed, who looks, who acts (S79 to S81)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.storing import KEYED, STREAM, Clock, database_of, drain, drained, keyed, lose_an_answer

from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.protocol.store.layouts import KEY_SPACE, Plan, Unit, scaling_by_policy
from headgate.storage.local import LocalStorage
from headgate.store.catalogue import tables as t
from headgate.store.store import Store
from headgate.store.streams import Scaling, StreamReset

KEYS = "abcdefghijklmnop"
MINUTE = 60_000
SCALING = Scaling(events_per_second=1, max_segments=8)


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000, date_ms=0)


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with opened(tmp_path, clock) as made:
        made.create_stream(STREAM, KEYED, segments=2, routing_key="key", scaling=SCALING)
        yield made


def opened(root: Path, clock: Clock) -> Store:
    made = Store.open(root / "store")
    return Store(made.root, made._core.catalogue, LocalStorage(root / "store" / "chunks"), clock=clock)


def rounds(store: Store, clock: Clock, minutes: int, per_minute: int, first: int = 0) -> int:
    """Write so many rounds of all keys a minute, through one writer; return the number of the next one."""
    with store.writer(STREAM, linger=None) as writer:
        for _ in range(minutes):
            clock.now_ms += MINUTE
            for number in range(first, first + per_minute):
                writer.append(keyed(*((key, number) for key in KEYS)))
            first += per_minute
            writer.flush()
    return first


def test_a_hot_stream_gets_segments_and_a_cold_one_loses_them(store: Store, clock: Clock) -> None:  # S79, S81
    done = rounds(store, clock, minutes=11, per_minute=20)  # 16 keys, 20 rounds: 5 events a second
    hot = store.find(STREAM)
    assert hot.layout_epoch == 1  # the writer has looked
    assert hot.segments_count == 6
    done = rounds(store, clock, minutes=8, per_minute=20, first=done)
    assert store.find(STREAM).layout_epoch == 1  # it cools down
    for count in (3, 2, 1):
        clock.now_ms += 21 * MINUTE
        assert store.autoscale(STREAM)
        assert store.find(STREAM).segments_count == count
    done = rounds(store, clock, minutes=1, per_minute=1, first=done)
    by_key: dict[str, list[int]] = {key: [] for key in KEYS}
    for segment in drain(store):
        for key, value in segment:
            by_key[key].append(value)
    assert by_key == {key: list(range(done)) for key in KEYS}  # in order
    assert store.fsck() == []


def test_a_sealed_stream_is_not_scaled_by_its_policy(store: Store, clock: Clock) -> None:
    rounds(store, clock, minutes=2, per_minute=1)
    store.seal(STREAM)
    clock.now_ms += 60 * MINUTE
    assert not store.autoscale(STREAM)
    assert store.find(STREAM).segments_count == 2


def test_what_came_to_one_segment_is_not_counted_for_another(store: Store, clock: Clock) -> None:  # S79
    with store.writer(STREAM) as writer:
        writer.append(keyed(*(("a", number) for number in range(5))))
    stream = store.find(STREAM)
    observed = store._core.catalogue.observe(stream, clock.wall_ms())
    assert observed is not None
    assert {number: set(amounts) for number, amounts in observed.amounts.items()} == {
        number: {end} for number, end in enumerate(store.describe(STREAM).ends)
    }


def test_by_data_rate_bytes_are_counted(store: Store, clock: Clock) -> None:  # S79
    store.set_scaling(STREAM, Scaling(bytes_per_second="1MB"))
    rounds(store, clock, minutes=11, per_minute=20)
    assert store.find(STREAM).layout_epoch == 0
    store.set_scaling(STREAM, Scaling(bytes_per_second=10))  # more than the events that it gets
    assert store.autoscale(STREAM)


def test_what_came_is_counted_for_each_window_whoever_wrote_it(store: Store, clock: Clock) -> None:  # S79
    store.set_scaling(STREAM, Scaling(events_per_second=1_000))
    rounds(store, clock, minutes=3, per_minute=1)
    clock.now_ms += 3 * MINUTE
    rounds(store, clock, minutes=1, per_minute=2)
    transaction = store.transactions.begin(STREAM, owner="p", epoch=1, name="t")
    transaction.write(keyed(("a", 1)))
    transaction.prepare()
    clock.now_ms += MINUTE
    store.commit_transactions([(STREAM, "t")], owner="p", epoch=1)
    observed = store._core.catalogue.observe(store.find(STREAM), clock.now_ms)
    assert observed is not None
    assert observed.unchanged_ms == 8 * MINUTE
    totals = [sum(amounts) for amounts in zip(*observed.amounts.values(), strict=True)]  # type: ignore[arg-type]
    assert totals == [2 * 16 + 1, 2 * 16 + 1, 5 * 16 + 1, 5 * 16 + 1]
    clock.now_ms += 19 * MINUTE + 30_000  # the first rounds are too long ago for the last window
    observed = store._core.catalogue.observe(store.find(STREAM), clock.now_ms)
    assert observed is not None
    assert [sum(x[3] or 0 for x in observed.amounts.values())] == [1]


def test_what_was_truncated_is_not_taken_for_silence(store: Store, clock: Clock) -> None:  # S80
    rounds(store, clock, minutes=1, per_minute=1)
    store.truncate(store.tail(STREAM))
    clock.now_ms += 3 * MINUTE
    observed = store._core.catalogue.observe(store.find(STREAM), clock.now_ms)
    assert observed is not None
    assert set(observed.amounts.values()) == {(None,) * 4}
    rounds(store, clock, minutes=1, per_minute=1)
    clock.now_ms += 2 * MINUTE
    observed = store._core.catalogue.observe(store.find(STREAM), clock.now_ms)
    assert observed is not None
    assert {amounts[0] for amounts in observed.amounts.values()} == {0}
    assert {amounts[1] for amounts in observed.amounts.values()} == {None}


def test_of_two_processes_that_look_at_once_one_scales(store: Store, clock: Clock, tmp_path: Path) -> None:  # S81
    store.set_scaling(STREAM, Scaling(events_per_second=1_000))
    rounds(store, clock, minutes=11, per_minute=20)
    info = store.set_scaling(STREAM, SCALING)
    with opened(tmp_path, clock) as other:
        observed = other._core.catalogue.observe(other.find(STREAM), clock.now_ms)
        assert observed is not None
        assert info.scaling is not None
        plan = scaling_by_policy(info.scaling, observed)
        assert isinstance(plan, Plan)
        assert store.autoscale(STREAM)
        assert not other._core.catalogue.autoscale(info, plan, clock.now_ms)
        assert not other.autoscale(STREAM)  # it cools down, which everybody sees
    assert store.find(STREAM).layout_epoch == 1


def test_a_step_whose_answer_was_lost_is_made_once(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:  # S81
    store.set_scaling(STREAM, Scaling(events_per_second=1_000))
    rounds(store, clock, minutes=11, per_minute=20)
    store.set_scaling(STREAM, SCALING)
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            store.autoscale(STREAM)
    assert not store.autoscale(STREAM)
    assert store.find(STREAM).layout_epoch == 1


def test_nothing_is_done_by_a_policy_that_the_stream_has_no_more(store: Store, clock: Clock) -> None:  # S81
    info = store.find(STREAM)
    plan = Plan(0, (0,), ((0, 5), (5, KEY_SPACE // 2)))
    store.set_scaling(STREAM, None)
    assert not store._core.catalogue.autoscale(info, plan, clock.now_ms)
    assert not store.autoscale(STREAM)
    store.set_scaling(STREAM, SCALING)
    store.seal(STREAM)
    assert store._core.catalogue.observe(store.find(STREAM), clock.now_ms) is None
    store.delete(STREAM)
    store.create_stream(STREAM, KEYED, segments=2, scaling=SCALING)
    assert not store._core.catalogue.autoscale(info, plan, clock.now_ms)
    assert store.find(STREAM).layout_epoch == 0


def test_scaling_by_hand_has_it_cool_down_too(store: Store, clock: Clock) -> None:  # S80
    clock.now_ms += 30 * MINUTE
    store.split(STREAM, 0)
    observed = store._core.catalogue.observe(store.find(STREAM), clock.now_ms)
    assert observed is not None
    assert observed.unchanged_ms == 0


def test_a_look_that_fails_fails_nobody(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # S81
    def fail(*_: object) -> None:
        raise StorageError("read", "catalogue", "disk I/O error")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "headgate"):
        patch.setattr(store._core.catalogue, "observe", fail)
        rounds(store, clock, minutes=1, per_minute=1)
    assert "could not be scaled: " in caplog.text
    assert len(drained(store)) == 16


def test_a_stream_that_a_pipeline_empties_keeps_its_policy(store: Store) -> None:  # S79, SO5
    for wanted in ((2, "key", None), None):
        life = PipelineIdentity(f"life {wanted}", "/a", "h", 1)
        reset = StreamReset({STREAM: wanted}, "p/sink", 1, life, "p/")
        assert store.pipelines.start_over(reset, lambda owner: True) is None
        assert store.find(STREAM).scaling == SCALING.checked()


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        (Scaling(), "events_per_second= or bytes_per_second=, one of both"),
        (Scaling(events_per_second=1, bytes_per_second=1), "one of both"),
        (Scaling(events_per_second=0), "a whole number of at least 1"),
        (Scaling(events_per_second=1, min_segments=3, max_segments=2), "min_segments=3, max_segments=2. cannot be"),
        (Scaling(events_per_second=1, max_segments=5_000), "1 to 4096 segments"),
        (Scaling(events_per_second=1, cool_down="soon"), "cool_down"),
        (7, "must be a Scaling"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(store: Store, scaling: Scaling, sentence: str) -> None:  # S79
    with pytest.raises(UsageError, match=sentence):
        store.set_scaling(STREAM, scaling)
    assert store.find(STREAM).scaling == SCALING.checked()
    assert SCALING.checked().unit is Unit.EVENTS


def test_a_damaged_policy_is_told(store: Store) -> None:
    for text in ("x", '{"unit": "tea", "numbers": [1, 1, 1, 1]}', '{"unit": "events", "numbers": [0, 1, 1, 1]}'):
        with database_of(store).write() as connection:
            connection.execute(t.streams.update().values(scaling=text))
        with pytest.raises(CorruptionError, match="a scaling policy"):
            store.find(STREAM)
