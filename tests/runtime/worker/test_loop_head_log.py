"""Loop logs: each checkpoint gets exactly the feedback that was appended for it, at any later parallelism."""

from __future__ import annotations

import errno
import gc
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.codec.loop_log import decode_log
from headgate.codec.snapshot import Buffer
from headgate.errors import CorruptionError, ProtocolViolation, StorageError, UsageError
from headgate.model.ids import CheckpointId
from headgate.operators.base import RestoredState
from headgate.operators.keys import partition
from headgate.runtime.wire.spill import SpillBudget
from headgate.runtime.worker import loop_head
from headgate.runtime.worker.loop_head import LoopLog, SealedLog, log_owner, replay_logs

SCHEMA = pa.schema([("key", pa.int64()), ("number", pa.int64())])
PLENTY = 1 << 30
GROUPS = 16
ONE, TWO, THREE = (CheckpointId(n) for n in (1, 2, 3))
ALL = log_owner(("key",), GROUPS, 1, 0)

Row = tuple[int, int]


def batch(rows: Sequence[Row]) -> pa.RecordBatch:
    return pa.record_batch([[key for key, _ in rows], [number for _, number in rows]], schema=SCHEMA)


def rows_of(found: pa.RecordBatch) -> list[Row]:
    return list(zip(found.column(0).to_pylist(), found.column(1).to_pylist(), strict=True))


def joined(parts: Sequence[Buffer]) -> memoryview:
    return memoryview(b"".join(bytes(memoryview(part)) for part in parts))


def replayed(sealed: SealedLog) -> list[Row]:
    """Return what a head that owns everything replays of ``sealed``."""
    state = RestoredState(0, 1, joined(sealed.encode()))
    return [row for found in replay_logs([state], SCHEMA, ALL, "ranks") for row in rows_of(found)]


def by_key(rows: Sequence[Row]) -> dict[int, list[int]]:
    found = defaultdict(list)
    for key, number in rows:
        found[key].append(number)
    return dict(found)


def log_with(memory_bytes: int = PLENTY, disk_bytes: int = PLENTY) -> tuple[LoopLog, SpillBudget]:
    budget = SpillBudget(memory_bytes, disk_bytes, piece_bytes=2_000)
    return LoopLog("loop 'ranks', head 0", SCHEMA, ALL, budget), budget


def test_overlapping_checkpoints_share_one_copy_of_a_batch() -> None:
    log, budget = log_with()
    log.open(ONE)
    log.append(batch([(1, 10)]), (ONE,))
    log.open(TWO)
    log.append(batch([(2, 20)]), (ONE, TWO))
    alone = log.size_bytes(TWO)
    assert (log.pending, log.elements(ONE), log.elements(TWO)) == ((ONE, TWO), 2, 1)
    assert log.memory_bytes == budget.memory_used_bytes == log.size_bytes(ONE) == 2 * alone
    log.drop(ONE)
    assert (log.pending, log.memory_bytes) == ((TWO,), alone)
    assert replayed(log.seal(TWO)) == [(2, 20)]
    assert (log.memory_bytes, budget.memory_used_bytes) == (0, 0)


# L2
def test_a_logged_batch_is_referred_to_and_not_copied() -> None:
    log, _ = log_with()
    log.open(ONE)
    big = batch([(n, n) for n in range(10_000)])
    before = pa.total_allocated_bytes()
    for _ in range(10):
        log.append(big, (ONE,))
    assert pa.total_allocated_bytes() - before < big.nbytes
    assert log.size_bytes(ONE) > 10 * big.nbytes


# L5
def test_an_aborted_log_is_released_and_a_second_abort_is_nothing() -> None:
    log, budget = log_with(memory_bytes=0)
    log.open(ONE)
    log.append(batch([(1, 10)]), (ONE,))
    assert budget.disk_used_bytes > 0
    log.drop(ONE)
    log.drop(ONE)
    log.drop(THREE)
    assert (budget.disk_used_bytes, log.spilled_bytes, log.pending, log.elements(ONE)) == (0, 0, (), 0)


def test_a_sealed_log_is_not_disturbed_and_encodes_the_same_twice() -> None:
    log, budget = log_with(memory_bytes=400)
    log.open(ONE)
    log.open(TWO)
    log.append(batch([(1, 10)]), (ONE, TWO))
    log.append(batch([(1, 11)]), (ONE, TWO))
    sealed = log.seal(ONE)
    assert (sealed.elements, sealed.size_bytes) == (2, log.size_bytes(TWO))
    log.append(batch([(1, 12)]), (TWO,))
    log.drop(ONE)
    log.drop(TWO)
    assert log.spilled_bytes > 0
    assert replayed(sealed) == replayed(sealed) == [(1, 10), (1, 11)]
    del sealed
    assert (log.spilled_bytes, log.memory_bytes) == (0, 0)
    assert (budget.disk_used_bytes, budget.memory_used_bytes) == (0, 0)


def test_nothing_is_logged_for_no_checkpoint_and_of_no_rows() -> None:
    log, budget = log_with()
    log.open(ONE)
    log.append(batch([(1, 10)]), ())
    log.append(batch([]), (ONE,))
    assert (log.elements(ONE), budget.memory_used_bytes) == (0, 0)


def test_closing_frees_everything_also_what_sealed_logs_hold(tmp_path: Path) -> None:
    budget = SpillBudget(300, PLENTY, tmp_path)
    log = LoopLog("loop 'ranks', head 0", SCHEMA, ALL, budget)
    log.open(ONE)
    log.open(TWO)
    for number in range(5):
        log.append(batch([(1, number)]), (ONE, TWO))
    sealed = log.seal(ONE)
    assert list(tmp_path.iterdir()) == []
    log.close()
    log.close()
    assert (budget.memory_used_bytes, budget.disk_used_bytes, log.memory_bytes) == (0, 0, 0)
    with pytest.raises(StorageError, match="they are closed already"):
        sealed.encode()
    del sealed
    assert (log.memory_bytes, budget.memory_used_bytes) == (0, 0)


def test_the_disk_limit_holds_for_logs_too() -> None:
    log, _ = log_with(memory_bytes=0, disk_bytes=500)
    log.open(ONE)
    log.append(batch([(1, 1)]), (ONE,))
    with pytest.raises(StorageError, match=r"cannot spill the log of loop 'ranks', head 0: .*limit on disk"):
        log.append(batch([(1, 1)] * 50), (ONE,))
    log.close()


def test_no_space_to_encode_is_a_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    log, _ = log_with(memory_bytes=0)
    log.open(ONE)
    log.append(batch([(1, 1)]), (ONE,))
    sealed = log.seal(ONE)
    monkeypatch.setattr("headgate.runtime.worker.loop_head.tempfile.TemporaryFile", full)
    with pytest.raises(StorageError, match=r"cannot encode the log of loop 'ranks', head 0: .*No space"):
        sealed.encode()
    log.close()


MOVE = st.one_of(
    st.tuples(st.sampled_from(["open", "seal", "drop", "encode", "forget"]), st.integers(0, 5)),
    st.tuples(st.just("append"), st.tuples(st.integers(1, 4), st.integers(0, 63))),
)


@given(st.integers(0, 2_000), st.lists(MOVE, max_size=50))
def test_any_history_is_that_of_a_plain_list_per_checkpoint(
    memory_bytes: int, moves: list[tuple[str, int | tuple[int, int]]]
) -> None:
    log, budget = log_with(memory_bytes)
    pending: dict[CheckpointId, list[Row]] = {}
    sealed: list[tuple[SealedLog, list[Row]]] = []
    latest, number = 0, 0
    for move, argument in moves:
        if isinstance(argument, tuple):
            count, mask = argument
            new = [(n % 3, n) for n in range(number, number + count)]
            number += count
            into = tuple(c for i, c in enumerate(pending) if mask >> i & 1)
            log.append(batch(new), into)
            for checkpoint in into:
                pending[checkpoint] += new
        elif move == "open":
            latest += 1
            log.open(CheckpointId(latest))
            pending[CheckpointId(latest)] = []
        elif move in ("encode", "forget") and sealed:
            one, expected = sealed[argument % len(sealed)]
            assert by_key(replayed(one)) == by_key(expected)
            if move == "forget":
                del sealed[argument % len(sealed)], one
        elif move in ("seal", "drop") and pending:
            checkpoint = list(pending)[argument % len(pending)]
            expected = pending.pop(checkpoint)
            if move == "seal":
                sealed.append((log.seal(checkpoint), expected))
            else:
                log.drop(checkpoint)
        assert log.pending == tuple(pending)
        assert log.memory_bytes == budget.memory_used_bytes <= memory_bytes
    for one, expected in sealed:
        assert by_key(replayed(one)) == by_key(expected)
    sealed, one = [], None  # type: ignore[assignment]
    for checkpoint in log.pending:
        assert by_key(replayed(log.seal(checkpoint))) == by_key(pending[checkpoint])
    gc.collect(0)
    assert (log.memory_bytes, log.spilled_bytes) == (0, 0)
    assert (budget.memory_used_bytes, budget.disk_used_bytes) == (0, 0)


def test_one_head_replays_the_logs_of_all_former_heads_of_a_loop_with_keys() -> None:
    states, sent = [], list[Row]()
    for index, part in enumerate(partition(batch([(key, key) for key in range(20)]), ("key",), GROUPS, 2)):
        assert part is not None
        log = LoopLog("x", SCHEMA, log_owner(("key",), GROUPS, 2, index), SpillBudget(PLENTY, PLENTY))
        log.open(ONE)
        log.append(part, (ONE,))
        sent += rows_of(part)
        states.append(RestoredState(index, 2, joined(log.seal(ONE).encode())))
        log.close()
    assert sorted(row for one in replay_logs(states, SCHEMA, ALL, "x") for row in rows_of(one)) == sorted(sent)


# L21
@pytest.mark.parametrize("former", [1, 2, 3, 5])
@pytest.mark.parametrize("now", [1, 2, 3, 5])
@pytest.mark.parametrize("keys", [("key",), ()])
@settings(max_examples=30)
@given(data=st.data())
def test_every_logged_row_is_replayed_once_and_in_the_order_of_its_key(
    former: int, now: int, keys: tuple[str, ...], data: st.DataObject
) -> None:  # L21
    drawn = data.draw(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=20), max_size=6))
    memory_bytes = data.draw(st.sampled_from([0, 700, PLENTY]))
    budget = SpillBudget(memory_bytes, PLENTY)
    logs = [LoopLog("x", SCHEMA, log_owner(keys, GROUPS, former, i), budget) for i in range(former)]
    for log in logs:
        log.open(ONE)
    number, sent = 0, list[Row]()
    for position, some_keys in enumerate(drawn):
        rows = [(key, number + i) for i, key in enumerate(some_keys)]
        number += len(rows)
        sent += rows
        if keys:
            for log, part in zip(logs, partition(batch(rows), keys, GROUPS, former), strict=True):
                if part is not None:
                    log.append(part, (ONE,))
        else:
            logs[position % former].append(batch(rows), (ONE,))
    states = [RestoredState(i, former, joined(log.seal(ONE).encode())) for i, log in enumerate(logs)]
    found: list[Row] = []
    for index in range(now):
        owner = log_owner(keys, GROUPS, now, index)
        mine = [row for one in replay_logs(states[::-1], SCHEMA, owner, "x") for row in rows_of(one)]
        if keys and mine:
            assert partition(batch(mine), keys, GROUPS, now)[index].num_rows == len(mine)
        found += mine
    assert sorted(found, key=lambda row: row[1]) == sent
    if keys:
        assert by_key(found) == by_key(sent)
    for log in logs:
        log.close()


# L21
def test_a_log_without_a_key_is_replayed_in_the_order_of_arrival() -> None:
    owner = log_owner((), GROUPS, 1, 0)
    log = LoopLog("x", SCHEMA, owner, SpillBudget(500, PLENTY))
    log.open(ONE)
    sent = [(n * 7 % 5, n) for n in range(40)]
    for at in range(0, 40, 8):
        log.append(batch(sent[at : at + 8]), (ONE,))
    states = [RestoredState(0, 1, joined(log.seal(ONE).encode()))]
    assert [row for one in replay_logs(states, SCHEMA, owner, "x") for row in rows_of(one)] == sent
    log.close()


def test_former_heads_are_replayed_in_their_order_whatever_the_order_of_their_states() -> None:
    states = []
    for index in range(3):
        log = LoopLog("x", SCHEMA, log_owner((), GROUPS, 3, index), SpillBudget(PLENTY, PLENTY))
        log.open(ONE)
        log.append(batch([(0, index)]), (ONE,))
        states.append(RestoredState(index, 3, joined(log.seal(ONE).encode())))
    mixed = [states[1], states[2], states[0]]
    found = [row for one in replay_logs(mixed, SCHEMA, log_owner((), GROUPS, 1, 0), "x") for row in rows_of(one)]
    assert found == [(0, 0), (0, 1), (0, 2)]


def test_at_another_parallelism_every_head_replays_the_keys_that_it_owns() -> None:
    log, _ = log_with()
    log.open(ONE)
    log.append(batch([(key, 0) for key in range(20)]), (ONE,))
    states = [RestoredState(0, 1, joined(log.seal(ONE).encode()))]
    for index in range(2):
        owner = log_owner(("key",), GROUPS, 2, index)
        mine = [row for one in replay_logs(states, SCHEMA, owner, "x") for row in rows_of(one)]
        part = partition(batch(mine), ("key",), GROUPS, 2)[index]
        assert part is not None
        assert part.num_rows == len(mine)


def test_the_log_of_the_restored_checkpoint_is_replayed_at_every_restore() -> None:
    log, _ = log_with()
    states = []
    for number, checkpoint in enumerate((ONE, TWO)):
        log.open(checkpoint)
        log.append(batch([(1, number)]), (checkpoint,))
        states.append(RestoredState(0, 1, joined(log.seal(checkpoint).encode())))
    for _ in range(2):
        assert [row for one in replay_logs(states[:1], SCHEMA, ALL, "x") for row in rows_of(one)] == [(1, 0)]


def test_long_logs_are_cut_into_chunks_and_replayed_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_head, "CHUNK_ROWS", 10_000)
    log, _ = log_with(memory_bytes=200_000)
    log.open(ONE)
    sent = [(n % 100, n) for n in range(25_000)]
    for at in range(0, 25_000, 2_500):
        log.append(batch(sent[at : at + 2_500]), (ONE,))
    state = RestoredState(0, 1, joined(log.seal(ONE).encode()))
    assert [chunk.rows for chunk in decode_log(state.payload, SCHEMA, "x").chunks] == [10_000, 10_000, 5_000]
    found = list(replay_logs([state], SCHEMA, ALL, "x"))
    assert max(one.num_rows for one in found) == loop_head.REPLAY_ROWS_MAX
    assert by_key([row for one in found for row in rows_of(one)]) == by_key(sent)
    log.close()


def test_an_empty_log_is_small_and_replays_nothing() -> None:
    log, _ = log_with()
    log.open(ONE)
    data = joined(log.seal(ONE).encode())
    assert len(data) < 1_000
    assert decode_log(data, SCHEMA, "x").group_rows.tolist() == [0] * GROUPS
    assert list(replay_logs([RestoredState(0, 1, data)], SCHEMA, ALL, "x")) == []


def test_a_record_of_a_key_that_the_head_does_not_own_is_a_violation() -> None:
    log = LoopLog("x", SCHEMA, log_owner(("key",), GROUPS, 5, 2), SpillBudget(PLENTY, PLENTY))
    log.open(ONE)
    log.append(batch([(key, 0) for key in range(50)]), (ONE,))
    with pytest.raises(ProtocolViolation, match="head 2, not its key's owner"):
        log.seal(ONE).encode()


def test_damage_is_found_before_anything_is_replayed() -> None:
    log, _ = log_with()
    log.open(ONE)
    log.append(batch([(1, 1), (2, 2)]), (ONE,))
    data = bytearray(joined(log.seal(ONE).encode()))
    data[-20] ^= 4
    with pytest.raises(CorruptionError, match="log of ranks, head 0 is damaged"):
        replay_logs([RestoredState(0, 1, memoryview(data))], SCHEMA, ALL, "ranks")
    with pytest.raises(CorruptionError):
        replay_logs([RestoredState(0, 1, memoryview(data)[:-8])], SCHEMA, ALL, "ranks")


def test_the_log_of_another_head_or_of_other_keys_is_refused() -> None:
    log, _ = log_with()
    log.open(ONE)
    data = joined(log.seal(ONE).encode())
    with pytest.raises(CorruptionError, match="head 1 is damaged"):
        replay_logs([RestoredState(1, 2, data)], SCHEMA, ALL, "ranks")
    for owner in (log_owner(("number",), GROUPS, 1, 0), log_owner((), GROUPS, 1, 0), log_owner(("key",), 8, 1, 0)):
        with pytest.raises(UsageError, match=r"has the keys \['key'\] in 16 key groups"):
            replay_logs([RestoredState(0, 1, data)], SCHEMA, owner, "ranks")


def test_a_log_is_encoded_beside_appends_and_reclaims() -> None:
    log, budget = log_with(memory_bytes=3_000)
    outcomes: list[bool] = []

    def encode(sealed: SealedLog, expected: list[Row]) -> None:
        outcomes.append(by_key(replayed(sealed)) == by_key(expected))

    threads, number = [], 0
    log.open(CheckpointId(1))
    for checkpoint in range(1, 20):
        log.open(CheckpointId(checkpoint + 1))
        expected: list[Row] = []
        for _ in range(20):
            new = [(number % 5, number)]
            number += 1
            expected += new
            log.append(batch(new), (CheckpointId(checkpoint), CheckpointId(checkpoint + 1)))
        sealed = log.seal(CheckpointId(checkpoint))
        log.drop(CheckpointId(checkpoint + 1))
        log.open(CheckpointId(checkpoint + 1))
        threads.append(threading.Thread(target=encode, args=(sealed, expected)))
        threads[-1].start()
        del sealed
    for thread in threads:
        thread.join()
    threads.clear()
    gc.collect()  # a sealed log may be part of a cycle of references
    assert outcomes == [True] * 19
    log.drop(CheckpointId(20))
    assert (log.memory_bytes, log.spilled_bytes) == (0, 0)
    assert (budget.memory_used_bytes, budget.disk_used_bytes) == (0, 0)


def test_a_log_of_ten_times_the_memory_share_is_kept_and_encoded_on_disk() -> None:
    share, process, rows = 4 << 20, psutil.Process(), 50_000
    budget = SpillBudget(share, PLENTY)
    log = LoopLog("x", SCHEMA, ALL, budget)
    log.open(ONE)
    one = pa.record_batch([pa.array(range(rows)), pa.array(range(rows))], schema=SCHEMA)
    rss, allocated, count = process.memory_info().rss, pa.total_allocated_bytes(), 0
    while log.size_bytes(ONE) < 10 * share:
        log.append(pa.record_batch([one.column(0), pa.array([count] * rows)], schema=SCHEMA), (ONE,))
        count += 1
    assert pa.total_allocated_bytes() - allocated <= 1.1 * share
    assert process.memory_info().rss - rss < 5 * share
    parts = log.seal(ONE).encode()
    assert pa.total_allocated_bytes() - allocated <= 1.1 * share
    assert sum(memoryview(part).nbytes for part in parts) < 1.02 * count * one.nbytes
    log.close()
