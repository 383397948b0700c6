"""Real processes share a transaction; some are killed or stopped at any point. It is committed once, whole."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.conftest import few
from tests.store.storing import KEYED, STREAM, drain, drained, keyed
from tests.store.test_store_crash import kill, lines_of, start

from headgate.errors import FencedError
from headgate.protocol.store.transactions import Status
from headgate.store.store import Store

WRITER = """
import sys
import pyarrow as pa
from headgate.store.store import Store
root, id, name, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
transaction = Store.open(root).transaction("app/events", id)
writer = transaction.writer(name)
schema = pa.schema([pa.field("key", pa.large_string()), pa.field("value", pa.int64())])
print("from", writer.next_sequence, flush=True)
for number in range(1, count + 1):  # from the beginning: what is there already is dropped
    writer.write(pa.record_batch([[name, "all"], [number, number]], schema=schema), sequence=number)
    if number % 3 == 0:
        writer.flush()
        print(number, flush=True)
        if "asked" in sys.argv:
            sys.stdin.readline()  # holds no lock here
writer.close()
print("done", flush=True)
"""

DECIDER = """
import sys
from headgate.store.store import Store
root, id = sys.argv[1], sys.argv[2]
transaction = Store.open(root).transaction("app/events", id)
print("prepares", flush=True)
transaction.prepare()
print("commits", flush=True)
transaction.commit()
print("committed", flush=True)
sys.stdin.readline()
"""

WRITERS = [f"w{number}" for number in range(3)]
COUNT = 30


@pytest.mark.crash
@pytest.mark.parametrize("seed", few(range(2), 1))
def test_writers_share_a_transaction_that_is_committed_once_whoever_is_killed(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    transaction = store.begin_shared(STREAM)
    running = {name: start(WRITER, store.root, transaction.id, name, COUNT) for name in WRITERS}
    for name in rng.sample(WRITERS, 2):
        told = lines_of(running[name], rng.randint(1, 6))
        told += kill(running[name])
        durable = max([int(line) for line in told if line.isdecimal()], default=0)
        running[name] = start(WRITER, store.root, transaction.id, name, COUNT)
        (line,) = lines_of(running[name], 1)
        assert durable < int(line.removeprefix("from ")) <= COUNT + 1
    for process in running.values():
        assert process.communicate()[0].split()[-1] == "done"
        assert process.returncode == 0
    assert drained(store) == []
    for step in rng.sample(range(1, 4), 3):
        decider = start(DECIDER, store.root, transaction.id)
        lines_of(decider, step)
        kill(decider)
    again = store.transaction(STREAM, transaction.id)
    again.commit()
    again.commit()
    found = drain(store)
    for name in WRITERS:
        assert [v for s in found for k, v in s if k == name] == list(range(1, COUNT + 1))
    assert sorted(v for s in found for k, v in s if k == "all") == sorted([*range(1, COUNT + 1)] * len(WRITERS))
    info = again.status()
    assert (info.status, info.events_count) == (Status.COMMITTED, 2 * len(WRITERS) * COUNT)
    assert {who.sequence for who in info.participants} == {COUNT}
    assert [p for p in store.fsck() if not p.is_harmless] == []


@pytest.mark.crash
def test_what_killed_writers_leave_is_aborted_by_the_next_one(store: Store) -> None:  # TX8
    transaction = store.begin_shared(STREAM, lease="2s")
    victims = [start(WRITER, store.root, transaction.id, name, 100_000) for name in WRITERS[:2]]
    for victim in victims:
        lines_of(victim, 3)
        kill(victim)
    while transaction.status().status is Status.OPEN:
        time.sleep(0.2)  # the pace: not a wait for anything but dates
        with Store.open(store.root) as next_one:
            next_one.begin_shared(STREAM).abort()
    assert transaction.status().is_expired
    with pytest.raises(FencedError, match="longer than its lease of 2,000 ms"):
        transaction.commit()
    assert drained(store) == []
    assert store._core.storage.list("") == []
    assert [p for p in store.fsck() if not p.is_harmless] == []


@pytest.mark.crash
def test_a_writer_that_was_stopped_is_told_that_it_was_replaced(store: Store) -> None:  # TX4
    transaction = store.begin_shared(STREAM)
    stopped = start(WRITER, store.root, transaction.id, "w", 1_000_000, "asked")
    assert lines_of(stopped, 2) == ["from 1", "3"]
    stopped.send_signal(signal.SIGSTOP)
    try:
        while os.waitpid(stopped.pid, os.WUNTRACED | os.WNOHANG) == (0, 0):
            time.sleep(0.01)
        heir = transaction.writer("w")
        assert heir.next_sequence == 4
        heir.write(keyed(("heir", 1)))
        heir.close()
    finally:
        stopped.send_signal(signal.SIGCONT)
    stopped.communicate()
    assert stopped.returncode != 0
    transaction.commit()
    values = [v for s in drain(store) for k, v in s if k == "w"]
    assert values == [1, 2, 3]


def test_a_process_that_forgot_everything_finds_what_others_prepared(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        store.create_stream(STREAM, KEYED)
        transaction = store.begin_shared(STREAM, owner="nightly")
        with transaction.writer() as writer:
            writer.write(keyed(("x", 1)))
        transaction.prepare()
    with Store.open(tmp_path / "s") as store:
        (left,) = store.list_transactions(owner="nightly")
        store.transaction(left.stream, left.name).commit()
        assert drained(store) == [("x", 1)]
