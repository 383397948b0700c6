"""Real processes: many write at once, some are killed; acknowledged means present, once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.store.storing import KEYED, STREAM, drain, drained, keyed

from headgate.errors import FencedError
from headgate.store.store import Store

WRITER = """
import sys
import pyarrow as pa
from headgate.store.store import Store
root, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = Store.open(root)
schema = store.describe("app/events").schema
writer = store.writer("app/events", writer_id=name, epoch=1)
for n in range(count):
    writer.append(pa.record_batch([[name, name + "x"], [n, n]], schema=schema))
    writer.flush()
    print(n, flush=True)
"""

SINK = """
import sys
import pyarrow as pa
from headgate.store.store import Store
root, epoch, is_asked = sys.argv[1], int(sys.argv[2]), "asked" in sys.argv
store = Store.open(root)
schema = store.describe("app/events").schema
for n in range(100_000):
    transaction = store.transactions.begin("app/events", owner="p/sink", epoch=epoch, name=f"e{epoch}-{n}")
    transaction.write(pa.record_batch([[f"k{i}" for i in range(6)], [n] * 6], schema=schema))
    transaction.prepare()
    print("prepared", n, flush=True)
    if is_asked:
        sys.stdin.readline()  # holds no lock here
    store.commit_transactions([("app/events", transaction.name)], owner="p/sink", epoch=epoch)
    print("committed", n, flush=True)
"""


def start(program: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )


def lines_of(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(count)]


def kill(process: subprocess.Popen[str]) -> list[str]:
    """Kill for real; return the lines not read yet (whole ones)."""
    process.send_signal(signal.SIGKILL)
    rest = process.communicate()[0]
    return [line for line in rest.split("\n")[:-1] if line]


@pytest.mark.crash
def test_processes_that_write_at_once_lose_and_repeat_nothing_when_one_is_killed(store: Store) -> None:
    patient = [start(WRITER, store.root, f"w{i}", 15) for i in range(2)]
    victim = start(WRITER, store.root, "victim", 100_000)
    readers = [store.reader(STREAM, s) for s in range(3)]
    acknowledged = [int(line) for line in lines_of(victim, 5)]
    seen = [[row for b in iter(r.read, None) for row in b.to_pylist()] for r in readers]
    acknowledged += [int(line) for line in kill(victim)]
    for process in patient:
        assert process.communicate()[0].split() == [str(n) for n in range(15)]
        assert process.returncode == 0
    found = drain(store)
    for key in ("w0", "w0x", "w1", "w1x"):
        assert [v for s in found for k, v in s if k == key] == list(range(15))
    for key in ("victim", "victimx"):
        there = [v for s in found for k, v in s if k == key]
        assert there == list(range(len(there)))  # in order, once
        assert len(acknowledged) <= len(there) <= len(acknowledged) + 1  # at most one answer was lost
    assert [list(row.values()) for s in seen for row in s] == [
        list(row) for s, part in zip(seen, found, strict=True) for row in part[: len(s)]
    ]
    assert [p for p in store.fsck() if not p.is_harmless] == []
    again = store.writer(STREAM, writer_id="victim", epoch=2)
    assert again.next_sequence == len([1 for s in found for k, _ in s if k == "victim"]) + 1


@pytest.mark.crash
def test_a_killed_sink_leaves_whole_transactions_and_its_successor_decides_the_rest(store: Store) -> None:
    victim = start(SINK, store.root, 1)
    lines = lines_of(victim, 7)
    lines += kill(victim)
    committed = {line.split()[1] for line in lines if line.startswith("committed")}
    store.transactions.recover(STREAM, owner="p/sink", epoch=2)
    rounds = [v for _, v in drained(store)]
    assert {str(v) for v in rounds} >= committed
    assert all(rounds.count(v) == 6 for v in set(rounds))  # S14: never a part of one
    assert [t for t in store.list_transactions() if not t.status.is_terminal] == []
    assert store.fsck() == []


@pytest.mark.crash
def test_a_zombie_changes_nothing_after_its_successor_recovered(store: Store) -> None:
    zombie = start(SINK, store.root, 1, "asked")
    assert zombie.stdin is not None
    zombie.stdin.write("\n")
    zombie.stdin.flush()
    assert lines_of(zombie, 3) == ["prepared 0", "committed 0", "prepared 1"]
    zombie.send_signal(signal.SIGSTOP)
    try:
        store.transactions.recover(STREAM, owner="p/sink", epoch=2)
        before = drained(store)
    finally:
        zombie.send_signal(signal.SIGCONT)
    zombie.communicate("\n")
    assert zombie.returncode != 0
    assert drained(store) == before
    with pytest.raises(FencedError):
        store.transactions.begin(STREAM, owner="p/sink", epoch=1)


@pytest.mark.crash
def test_first_openers_at_once_agree(tmp_path: Path) -> None:
    program = """
import sys
import pyarrow as pa
from headgate.store.store import Store
store = Store.open(sys.argv[1])
schema = pa.schema([("key", pa.large_string()), ("value", pa.int64())])
print(store.create_stream("app/events", schema, if_not_exists=True).stream_id)
"""
    processes = [start(program, tmp_path / "new") for _ in range(3)]
    assert {process.communicate()[0].strip() for process in processes} == {"1"}
    with Store.open(tmp_path / "new") as store:
        assert store.describe(STREAM).schema == KEYED


@pytest.mark.crash
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_store_opened_before_a_fork_works_in_the_child(store: Store) -> None:
    with store.writer(STREAM) as writer:
        writer.append(keyed(("parent", 1)))
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with store.writer(STREAM) as writer:
                writer.append(keyed(("child", 1)))
            os.write(write_end, b"ok")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 2) == b"ok"
    os.close(read_end)
    os.close(write_end)
    assert sorted(k for k, _ in drained(store)) == ["child", "parent"]
    assert store.fsck() == []
