"""Reading ahead: bounded, in order, given up when nobody wants it; requests are run one by one, when a reader waits."""

from __future__ import annotations

import contextlib
import gc
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.store.storing import KEYED, keyed

from headgate.codec.chunk import PART_BYTES_MAX, PartEntry
from headgate.environment import SystemThreads
from headgate.errors import CorruptionError, StorageError, TruncatedError
from headgate.storage.memory import MemoryStorage
from headgate.store import chunks
from headgate.store import core as core_module
from headgate.store import reader as reader_module
from headgate.store.catalogue.records import StoredPart
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.reader import SegmentReader
from headgate.store.store import Store
from headgate.store.streams import StreamCut

ONE = "one"
CHUNKS = 12


class Afar(MemoryStorage):
    """Storage whose requests travel, and may fail, or come back changed."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int, int]] = []
        self.fails: Callable[[str], bool] = lambda path: False
        self.changes: Callable[[str], bool] = lambda path: False

    @property
    def is_afar(self) -> bool:
        return True

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        self.asked.append((path, offset, size_bytes))
        if self.fails(path):
            raise StorageError("get", path, "the network is down")
        found = super().get_range(path, offset, size_bytes)
        return bytes(len(found)) if self.changes(path) else found


class Waiting:
    """Threads that do nothing until somebody waits: then calls are run, in an order that the test decides."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self.most = 0
        self.is_out_of_threads = False
        self.process_id = 1
        self.pick: Callable[[int], int] = lambda count: 0
        self._real = SystemThreads()

    def pool(self, size: int, name: str) -> Waiting:
        return self

    def submit(self, call: Callable[[], object]) -> None:
        if self.is_out_of_threads:
            raise RuntimeError("can't start new thread")
        self.calls.append(call)
        self.most = max(self.most, len(self.calls))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.is_out_of_threads = True

    def run_all(self) -> None:
        while self.calls:
            self.calls.pop(self.pick(len(self.calls)))()

    def event(self) -> _Event:
        return _Event(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Event:
    def __init__(self, threads: Waiting) -> None:
        self._threads = threads
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            assert self._threads.calls, "nobody will ever set it"
            self._threads.calls.pop(self._threads.pick(len(self._threads.calls)))()
        return self._is_set


class Room:
    """A store whose chunks are afar: ``CHUNKS`` of three events each, in one segment."""

    def __init__(self, directory: Path) -> None:
        self.storage, self.threads = Afar(), Waiting()
        catalogue = SqlCatalogue.open(directory / "catalogue.sqlite")
        self.writing = Store(str(directory), catalogue, self.storage)
        self.store = Store(str(directory), catalogue, self.storage, threads=self.threads)  # type: ignore[arg-type]

    def append(self, number: int, rows: int = 3) -> None:
        with self.writing.writer(ONE, linger=None) as writer:
            writer.append(keyed(*(("k", number * 3 + n) for n in range(rows))))

    @property
    def taken_bytes(self) -> int:
        return sum(room.taken_bytes for _, room in self.store._core.prefetcher._here.values())

    def paths(self) -> list[str]:
        """Of the chunks, in their order."""
        found = self.store._core.catalogue.parts(self.store.find(ONE), 0, 0, 1_000)
        return [part.path for part in found.parts]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """What all tests begin with."""
    directory = tmp_path_factory.mktemp("written")
    made = Room(directory)
    made.writing.create_stream(ONE, KEYED, segments=1)
    for number in range(CHUNKS):
        made.append(number)
    made.writing.close()
    return directory, {path: made.storage.get(path) for path in made.storage.list("")}


@pytest.fixture
def room(written: tuple[Path, dict[str, bytes]], tmp_path: Path) -> Iterator[Room]:
    shutil.copytree(written[0], tmp_path / "room")
    made = Room(tmp_path / "room")
    for path, data in written[1].items():
        made.storage.put(path, [data])
    yield made
    made.writing.close()


def values(reader: SegmentReader, rows_max: int = 3, end: int | None = None) -> list[int]:
    batch = reader.read(rows_max, end)
    return [] if batch is None else batch.column(1).to_pylist()


def all_of(reader: SegmentReader, rows_max: int = 3) -> list[int]:
    found: list[int] = []
    while some := values(reader, rows_max):
        found += some
    return found


EVERYTHING = list(range(3 * CHUNKS))


@pytest.mark.parametrize("pick", [0, -1])
def test_parts_that_follow_are_on_their_way_together_over_borders_of_chunks(room: Room, pick: int) -> None:
    room.threads.pick = lambda count: pick
    reader = room.store.reader(ONE, 0)
    assert values(reader) == [0, 1, 2]
    assert (room.threads.most, len(room.storage.asked)) == (0, 1)  # who reads one part may want no other
    assert values(reader) == [3, 4, 5]
    assert room.threads.most == reader_module.RUNS_MAX
    assert all_of(reader) == EVERYTHING[6:]
    assert sorted(path for path, _, _ in room.storage.asked) == sorted(room.paths())
    assert room.taken_bytes == 0


def test_requests_are_under_way_at_one_time(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=120)
    usual = Afar.get_range

    def get_range(self: Afar, path: str, offset: int, size_bytes: int) -> bytes:
        if path in room.paths()[1:3]:
            both.wait()
        return usual(self, path, offset, size_bytes)

    monkeypatch.setattr(Afar, "get_range", get_range)
    assert all_of(room.writing.reader(ONE, 0)) == EVERYTHING


def test_what_is_fetched_ahead_is_bounded_in_requests_and_bytes(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "RUNS_MAX", 4)
    reader = room.store.reader(ONE, 0)
    assert all_of(reader) == EVERYTHING
    assert room.threads.most == 4
    room.threads.most = 0
    size_bytes = room.storage.asked[0][2]
    monkeypatch.setattr(reader_module, "AHEAD_BYTES", 3 * size_bytes - 1)
    reader = room.store.reader(ONE, 0)
    for number in range(CHUNKS):
        assert values(reader) == EVERYTHING[3 * number : 3 * number + 3]
        assert room.taken_bytes <= 2 * size_bytes
    assert room.threads.most == 2


def test_all_readers_of_a_store_share_its_room(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    size_bytes = room.store._core.catalogue.parts(room.store.find(ONE), 0, 0, 1).parts[0].entry.size_bytes
    monkeypatch.setattr(core_module, "FETCH_BYTES_MAX", 3 * size_bytes)
    readers = [room.store.reader(ONE, 0) for _ in range(3)]
    for number in range(CHUNKS):
        for reader in readers:
            assert values(reader) == EVERYTHING[3 * number : 3 * number + 3]
            assert room.taken_bytes <= 3 * size_bytes
    assert room.threads.most == 3


def test_nothing_is_fetched_ahead_at_a_tail(room: Room) -> None:
    reader = room.store.reader(ONE, 0)
    assert all_of(reader) == EVERYTHING
    room.threads.calls.clear()
    room.threads.is_out_of_threads = True  # another thread would only cost time
    room.threads.most = 0
    for number in range(CHUNKS, CHUNKS + 3):
        assert values(reader) == []
        room.append(number)
        assert values(reader) == [3 * number, 3 * number + 1, 3 * number + 2]
    assert len(room.storage.asked) == CHUNKS + 3


def test_nothing_behind_an_end_is_fetched(room: Room) -> None:
    reader = room.store.reader(ONE, 0)
    found: list[int] = []
    while reader.position < 13:
        found += values(reader, end=13)
    room.threads.run_all()
    assert found == EVERYTHING[:13]
    assert {path for path, _, _ in room.storage.asked} == set(room.paths()[:5])


def test_parts_behind_each_other_in_a_file_are_one_request(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "PART_ROWS_MAX", 2)
    room.append(CHUNKS, rows=60)
    reader = room.store.reader(ONE, 0, 3 * CHUNKS)
    assert all_of(reader, 5) == list(range(3 * CHUNKS, 3 * CHUNKS + 60))
    assert len(room.storage.asked) == 2
    room.storage.asked.clear()
    monkeypatch.setattr(reader_module, "RUN_BYTES", 2_000)
    assert all_of(room.store.reader(ONE, 0, 3 * CHUNKS), 5) == list(range(3 * CHUNKS, 3 * CHUNKS + 60))
    assert 2 < len(room.storage.asked) < 30
    assert all(size_bytes <= reader_module.RUN_BYTES for _, _, size_bytes in room.storage.asked)


def part(number: int, offset: int, size_bytes: int, path: str = "a") -> StoredPart:
    return StoredPart(number, path, PartEntry(0, 1, offset, size_bytes, 0))


@pytest.mark.parametrize(("offset", "size_bytes"), [(64, 0), (64, PART_BYTES_MAX + 1), (-64, 10)])
def test_a_part_that_cannot_be_ends_what_is_asked_for(offset: int, size_bytes: int) -> None:
    parts = [part(0, 64, 10), part(1, 128, 10), part(2, offset, size_bytes), part(3, 256, 10)]
    assert list(reader_module.runs_of(parts)) == [reader_module.ByteRun("a", 64, 74, 2)]
    apart = [part(0, 64, 10), part(1, 256, 10), part(2, 320, 10, "b"), part(3, 64, 10, "b")]
    assert [run.size_bytes for run in reader_module.runs_of(apart)] == [10, 10, 10, 10]


def test_the_least_and_the_largest_part_are_asked_for() -> None:
    parts = [part(0, 0, 1), part(1, 64, PART_BYTES_MAX)]
    found = list(reader_module.runs_of(parts))
    assert [(run.offset, run.size_bytes, run.end) for run in found] == [(0, 1, 1), (64, PART_BYTES_MAX, 2)]


def test_without_a_thread_each_part_is_asked_for_in_its_turn(room: Room) -> None:
    room.threads.is_out_of_threads = True
    assert all_of(room.store.reader(ONE, 0)) == EVERYTHING
    assert [path for path, _, _ in room.storage.asked] == room.paths()
    assert room.taken_bytes == 0


def test_files_of_this_machine_are_not_fetched_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module.Prefetcher, "begin", lambda *arguments: pytest.fail("it was fetched ahead"))
    with Store.open(tmp_path / "store") as store:
        store.create_stream(ONE, KEYED, segments=1)
        for number in range(3):
            with store.writer(ONE, linger=None) as writer:
                writer.append(keyed(("k", number)))
        assert all_of(store.reader(ONE, 0), 1) == [0, 1, 2]


# -- giving up -------------------------------------------------------------------------------------------------------


def test_a_closed_reader_ends_what_has_not_begun_and_can_read_on(room: Room) -> None:  # S83
    reader = room.store.reader(ONE, 0)
    assert (values(reader), values(reader)) == ([0, 1, 2], [3, 4, 5])
    asked = len(room.storage.asked)
    reader.close()
    reader.close()
    room.threads.run_all()
    assert (len(room.storage.asked), room.taken_bytes) == (asked, 0)
    assert all_of(reader) == EVERYTHING[6:]


def test_what_is_under_way_when_a_reader_is_closed_is_not_kept(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    # S83
    reader = room.store.reader(ONE, 0)
    assert (values(reader), values(reader)) == ([0, 1, 2], [3, 4, 5])
    usual = Afar.get_range

    def closing(self: Afar, path: str, offset: int, size_bytes: int) -> bytes:
        reader.close()
        return usual(self, path, offset, size_bytes)

    monkeypatch.setattr(Afar, "get_range", closing)
    (fetch, *_) = [call.__self__ for call in room.threads.calls]  # type: ignore[attr-defined]
    room.threads.run_all()
    assert (fetch._payload, room.taken_bytes) == (None, 0)


def test_a_reader_that_is_dropped_gives_its_room_back(room: Room) -> None:  # S83
    reader = room.store.reader(ONE, 0)
    assert (values(reader), values(reader)) == ([0, 1, 2], [3, 4, 5])
    assert room.taken_bytes > 0
    asked = len(room.storage.asked)
    del reader
    room.threads.run_all()
    assert (len(room.storage.asked), room.taken_bytes) == (asked, 0)


def test_a_reader_that_failed_and_is_dropped_gives_its_room_back(room: Room) -> None:  # S83
    """At once, not when the interpreter collects what refers to itself."""
    gc.disable()
    try:
        reader = room.store.reader(ONE, 0)
        path = room.paths()[4]
        room.storage.fails = lambda asked: asked == path
        with contextlib.suppress(StorageError):
            all_of(reader)
        room.storage.fails = lambda asked: False
        assert (values(reader), values(reader)) == ([12, 13, 14], [15, 16, 17])
        assert room.taken_bytes > 0
        del reader
        room.threads.run_all()
        assert room.taken_bytes == 0
    finally:
        gc.enable()


def test_a_closed_store_lets_nobody_wait(room: Room) -> None:  # S83
    reader = room.store.reader(ONE, 0)
    assert (values(reader), values(reader)) == ([0, 1, 2], [3, 4, 5])
    room.store._core.prefetcher.close()
    room.store._core.prefetcher.close()
    assert all_of(reader) == EVERYTHING[6:]


def test_a_reader_taken_through_a_fork_waits_for_nothing_of_its_parent(room: Room) -> None:  # S83
    reader = room.store.reader(ONE, 0)
    assert (values(reader), values(reader)) == ([0, 1, 2], [3, 4, 5])
    assert room.threads.calls
    room.threads.process_id = 2
    room.threads.calls.clear()
    assert all_of(reader) == EVERYTHING[6:]
    assert len(room.storage.asked) == CHUNKS, "each of its own requests was waited for"
    assert room.store._core.prefetcher.taken_bytes == 0, "in this process"


@pytest.mark.parametrize("wanted", [("b", 64, 10), ("a", 128, 10), ("a", 64, 74)])
def test_other_bytes_than_those_on_their_way_are_asked_for(wanted: tuple[str, int, int]) -> None:
    storage = Afar()
    for path in "ab":
        storage.put(path, [random.Random(path).randbytes(256)])
    ahead = reader_module.ReadAhead(storage, core_module.Prefetcher(Waiting()))  # type: ignore[arg-type]
    ahead.get_range("a", 0, 1)  # one that reads on
    ahead.ask([part(0, 64, 10), part(1, 128, 10, "b")], None)
    assert ahead.get_range(*wanted) == storage.get_range(*wanted)
    ahead.ask([part(0, 64, 10), part(1, 128, 10, "b")], None)
    for path, offset in (("a", 64), ("b", 128)):
        assert ahead.get_range(path, offset, 10) == storage.get_range(path, offset, 10)


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_failure_is_told_behind_everything_before_it(room: Room) -> None:
    broken = room.paths()[5]
    room.storage.fails = lambda path: path == broken
    reader = room.store.reader(ONE, 0)
    assert [values(reader) for _ in range(5)] == [EVERYTHING[at : at + 3] for at in range(0, 15, 3)]
    for _ in range(2):
        with pytest.raises(StorageError, match="the network is down"):
            reader.read()
    assert reader.position == 15
    room.storage.fails = lambda path: False
    assert all_of(reader) == EVERYTHING[15:]


def test_a_failure_that_nobody_waited_for_is_asked_for_again(room: Room) -> None:
    reader = room.store.reader(ONE, 0)
    assert values(reader) == [0, 1, 2]
    room.storage.fails = lambda path: path != room.paths()[1]
    assert values(reader) == [3, 4, 5]  # and those behind it fail, long before their turn
    room.threads.run_all()
    room.storage.fails = lambda path: False
    assert all_of(reader) == EVERYTHING[6:]


def test_a_file_that_is_truncated_while_it_is_fetched_is_told_as_truncated(room: Room) -> None:
    reader = room.store.reader(ONE, 0)
    assert (values(reader), values(reader)) == ([0, 1, 2], [3, 4, 5])
    paths = room.paths()
    room.writing.truncate(StreamCut(ONE, room.store.find(ONE).stream_id, {0: 30}))
    for path in paths[:10]:
        room.storage.delete(path)
    read = len({path for path, _, _ in room.storage.asked})  # what has come before stays good
    room.threads.run_all()
    found: list[int] = []
    with contextlib.suppress(TruncatedError):
        while some := values(reader):
            found += some
    with pytest.raises(TruncatedError):
        reader.read()
    assert found == EVERYTHING[6 : 6 + len(found)]
    assert len(found) <= 3 * read


def test_a_file_that_is_missing_ahead_is_damage_in_its_turn(room: Room) -> None:
    missing = room.paths()[4]
    room.storage.delete(missing)
    reader = room.store.reader(ONE, 0)
    assert values(reader, 100) == EVERYTHING[:12]
    with pytest.raises(CorruptionError, match="no such file") as raised:
        reader.read()
    assert missing in str(raised.value)


def test_bytes_that_were_changed_on_their_way_ahead_are_asked_for_again(room: Room) -> None:
    changed = room.paths()[4]
    room.storage.changes = lambda path: path == changed
    reader = room.store.reader(ONE, 0)
    assert values(reader, 100) == EVERYTHING[:12]
    with pytest.raises(CorruptionError, match="checksum"):
        reader.read()
    room.storage.changes = lambda path: False
    assert all_of(reader) == EVERYTHING[12:]


def test_whatever_fails_ahead_the_same_events_are_read(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, rows in enumerate((1, 2, 1, 65_536), CHUNKS):
        monkeypatch.setattr(chunks, "PART_ROWS_MAX", rows)
        room.append(number)
    end = 3 * (CHUNKS + 4)
    for seed in range(20):
        rng = random.Random(seed)
        monkeypatch.setattr(reader_module, "RUN_BYTES", rng.choice([1, 1_000, 1 << 20]))
        monkeypatch.setattr(reader_module, "AHEAD_BYTES", rng.choice([1, 2_000, 1 << 20]))
        room.threads.pick = rng.randrange
        room.storage.fails = lambda path, rng=rng: rng.random() < 0.2  # type: ignore[misc]
        room.storage.changes = lambda path, rng=rng: rng.random() < 0.1  # type: ignore[misc]
        reader, found = room.store.reader(ONE, 0), list[int]()
        while len(found) < end:
            if rng.random() < 0.1:
                reader.close()
            if rng.random() < 0.2:
                room.threads.run_all()
            with contextlib.suppress(StorageError, CorruptionError):
                found += values(reader, rng.choice([1, 2, 7, 100]), rng.choice([None, end]))
            assert found == list(range(len(found)))
        assert all_of(reader) == []
        reader.close()
        room.threads.run_all()
        assert room.taken_bytes == 0
