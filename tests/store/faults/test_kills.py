"""Real processes share a reader group or a transaction, and are killed or stopped at any point: nothing is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from tests.conftest import IS_DEEP, few
from tests.forked import CONTEXT, stopped
from tests.store.faults.group_program import GROUP, events_of, read, write
from tests.store.faults.test_store_crash import kill, lines_of, start
from tests.store.storing import KEYED, STREAM, drain, drained, keyed

from headgate.errors import FencedError, HeadgateError
from headgate.protocol.store.transactions import Status
from headgate.store.store import Store

WRITERS, READERS = 3, 3
STRIKES = ["kill", "kill", "stop", "scale", "scale"] * (3 if IS_DEEP else 1)
PATIENCE_S = 600
"""Until everything is read, on a machine that is slow and busy."""

Row = tuple[str, int]


class Processes:
    """The programs that run, by what they do."""

    def __init__(self, root: str, logs: Path) -> None:
        self.running: dict[str, BaseProcess] = {}
        self.logs = logs
        self._root = root
        self._starts = 0

    def start(self, name: str) -> None:
        """Start a writer or a reader; a reader says in a file of this life what it does."""
        self._starts += 1
        life = f"{name}-{self._starts}"
        if name.startswith("w"):
            process = CONTEXT.Process(target=write, args=(self._root, name, self._starts))
        else:
            process = CONTEXT.Process(target=read, args=(self._root, life, self.logs / life))
        process.start()
        self.running[name] = process

    def kill(self, name: str) -> None:
        """Kill one, and start it again."""
        if self.running[name].exitcode is None:
            self.running[name].kill()
            self.running[name].join()
            self.start(name)

    def is_over(self, kind: str) -> bool:
        """Whether all of a kind have ended; each must have ended well."""
        codes = [process.exitcode for name, process in self.running.items() if name.startswith(kind)]
        assert set(codes) <= {None, 0}, f"a program has failed: {codes}"
        return None not in codes

    def take_down(self) -> None:
        """End what is left."""
        for process in self.running.values():
            process.kill()
            process.join()


@contextmanager
def processes(root: str, logs: Path) -> Iterator[Processes]:
    found = Processes(root, logs)
    try:
        yield found
    finally:
        found.take_down()


def strike(what: str, chance: random.Random, store: Store, found: Processes) -> None:
    """Kill or stop one of the programs, or scale the stream."""
    name = chance.choice(sorted(found.running))
    match what:
        case "kill":
            found.kill(name)
        case "stop":
            with stopped(found.running[name]):
                time.sleep(chance.choice((0.5, 4)))  # not a wait for anything
        case _:
            with suppress(HeadgateError):
                present = [x.segment_id for x in store.layout(STREAM).present]
                store.split(STREAM, chance.choice(present)) if len(present) < 4 else store.merge(STREAM, present[:2])


def lives(logs: Path) -> dict[str, list[tuple[str, int, list[Row]]]]:
    """What each life of a reader has said; a line that a kill cut is none."""
    found = {}
    for file in sorted(logs.iterdir()):
        lines = [line for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        said = [json.loads(line) for line in lines]
        found[file.name] = [(what, at_ns, [(k, n) for k, n in rows or []]) for what, at_ns, rows in said]
    return found


def judge(said: dict[str, list[tuple[str, int, list[Row]]]], written: Counter[Row]) -> None:
    """Each event was processed once, in the order of its key.

    Of what a life has read before it was killed nobody knows whether its last commit took effect: it was processed by
    that life, or by whoever has read it again.
    """
    processed: list[tuple[int, list[Row]]] = []
    unknown: set[Row] = set()
    for lines in said.values():
        words = [what for what, _, _ in lines] + ["killed"]
        for number, (what, at_ns, rows) in enumerate(lines):
            if what == "read" and words[number + 1] == "committed":
                processed.append((at_ns, rows))
            elif what == "read" and words[number + 1] == "killed":
                unknown.update(rows)
    count = Counter(row for _, rows in processed for row in rows)
    assert [row for row, times in count.items() if times > 1] == [], "processed twice"
    assert count.keys() <= written.keys()
    assert written.keys() - count.keys() <= unknown, "lost"
    newest: dict[str, int] = {}
    for key, number in [row for _, rows in sorted(processed, key=lambda x: x[0]) for row in rows]:
        assert newest.get(key, -1) < number, f"{key} out of order"
        newest[key] = number


@pytest.mark.crash
def test_writers_and_readers_under_kills_and_scaling_process_each_event_once(tmp_path: Path) -> None:  # RG20
    chance = random.Random(26)
    logs = tmp_path / "logs"
    logs.mkdir()
    writers = [f"w{n}" for n in range(WRITERS)]
    with Store.open(tmp_path / "store") as store, processes(store.root, logs) as found:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        store.reader_group(GROUP, STREAM)
        for name in [*writers, *(f"r{n}" for n in range(READERS))]:
            found.start(name)
        for what in chance.sample(STRIKES, len(STRIKES)):
            time.sleep(chance.random())  # not a wait for anything
            strike(what, chance, store, found)
        until = time.monotonic() + PATIENCE_S
        while not found.is_over("w"):
            assert time.monotonic() < until, "the writers do not come to an end"
            time.sleep(0.1)
        store.seal(STREAM)
        until = time.monotonic() + PATIENCE_S
        while not found.is_over("r"):
            assert time.monotonic() < until, (
                f"the readers do not come to an end: {store.reader_group(GROUP).describe()}"
            )
            time.sleep(0.1)
        judge(lives(logs), Counter(row for name in writers for row in events_of(name)))
        assert store.reader_group(GROUP).unread_bytes() == 0
        assert [problem for problem in store.fsck() if not problem.is_harmless] == []


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ([("read", 1, [("k", 1)]), ("committed", 2, []), ("read", 3, [("k", 2)]), ("committed", 4, [])], None),
        ([("read", 1, [("k", 1)]), ("committed", 2, []), ("read", 3, [("k", 2)])], None),
        ([("read", 1, [("k", 1)]), ("committed", 2, []), ("read", 3, [("k", 2)]), ("fenced", 4, [])], "lost"),
        (
            [("read", 1, [("k", 1), ("k", 2)]), ("committed", 2, []), ("read", 3, [("k", 2)]), ("committed", 4, [])],
            "twice",
        ),
        (
            [("read", 1, [("k", 2)]), ("committed", 2, []), ("read", 3, [("k", 1)]), ("committed", 4, [])],
            "out of order",
        ),
    ],
    ids=["good", "killed", "lost", "twice", "order"],
)
def test_the_verdict_over_killed_readers_can_fail(said: list[tuple[str, int, list[Row]]], problem: str | None) -> None:
    written = Counter([("k", 1), ("k", 2)])
    if problem is None:
        judge({"silent": [], "reader": said}, written)
        return
    with pytest.raises(AssertionError, match=problem):
        judge({"reader": said}, written)


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

PARTICIPANTS = [f"w{number}" for number in range(3)]
COUNT = 30


@pytest.mark.crash
@pytest.mark.parametrize("seed", few(range(2), 1))
def test_writers_share_a_transaction_that_is_committed_once_whoever_is_killed(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    transaction = store.begin_shared(STREAM)
    running = {name: start(WRITER, store.root, transaction.id, name, COUNT) for name in PARTICIPANTS}
    for name in rng.sample(PARTICIPANTS, 2):
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
    for name in PARTICIPANTS:
        assert [v for s in found for k, v in s if k == name] == list(range(1, COUNT + 1))
    assert sorted(v for s in found for k, v in s if k == "all") == sorted([*range(1, COUNT + 1)] * len(PARTICIPANTS))
    info = again.status()
    assert (info.status, info.events_count) == (Status.COMMITTED, 2 * len(PARTICIPANTS) * COUNT)
    assert {who.sequence for who in info.participants} == {COUNT}
    assert [p for p in store.fsck() if not p.is_harmless] == []


@pytest.mark.crash
def test_what_killed_writers_leave_is_aborted_by_the_next_one(store: Store) -> None:  # TX8
    transaction = store.begin_shared(STREAM, lease="2s")
    victims = [start(WRITER, store.root, transaction.id, name, 100_000) for name in PARTICIPANTS[:2]]
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
