"""Disks of the machine room: what fails, what is there all the same, and what a power cut takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headgate.errors import StorageError
from headgate.sim.machine.files import SimFiles
from headgate.sim.machine.storage import Disk, SimStorage
from headgate.sim.machine.tasks import SimProcess, Tasks
from headgate.sim.machine.world import Fault, Faults, World
from headgate.storage.base import AlreadyExists, NotFound


class Room:
    """A disk with chosen faults, which always strike until ``calm``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *faults: Fault, lands_late: bool = False) -> None:
        self.world = World(1)
        self.tasks = Tasks(self.world)
        self.faults = Faults(self.world.random)
        self.faults.on, self.faults.puts_land_late = set(faults), lands_late
        monkeypatch.setattr(Faults, "strikes", Faults.has)
        self.disk = Disk(self.tasks, self.faults, "d")
        self.storage = SimStorage(self.disk)

    def calm(self) -> None:
        self.faults.on = set()

    def run(self, target: Callable[[], None]) -> None:
        done: list[bool] = []
        self.tasks.spawn(SimProcess(self.tasks, "p"), lambda: (target(), done.append(True))[1], "t")
        self.world.run(lambda: False, 10_000, 10_000)
        assert done


def test_a_put_that_failed_may_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, Fault.PUT_FAILS_AFTER)

    def put() -> None:
        with pytest.raises(StorageError):
            room.storage.put("a/b", [b"x"])
        assert room.storage.get("a/b") == b"x"
        assert room.storage.list("a") == ["a/b"]

    room.run(put)


def test_a_power_cut_takes_what_was_never_synced_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, Fault.SYNC_FAILS)

    def put() -> None:
        for path in ("kept", "lost"):
            with pytest.raises(StorageError):
                room.storage.put_if_absent(path, [b"x"])
        with pytest.raises(StorageError):
            room.storage.get("lost")  # shows nothing that it cannot sync
        room.calm()
        with pytest.raises(AlreadyExists):
            room.storage.put_if_absent("kept", [b"x"])  # which syncs what it finds

    room.run(put)
    room.disk.cut_power()
    assert room.disk.paths("") == ["kept"]


def test_an_object_store_may_carry_out_later_what_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, Fault.PUT_LANDS_LATE, lands_late=True)

    def put() -> None:
        assert room.storage.puts_may_land_late
        with pytest.raises(StorageError):
            room.storage.put_if_absent("late", [b"x"])
        with pytest.raises(NotFound):
            room.storage.get("late")
        room.tasks.park(1_000)
        assert room.storage.get("late") == b"x"

    monkeypatch.setattr(room.world.random, "randint", lambda low, high: high)
    room.run(put)


def test_a_bad_read_is_bad_once(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, Fault.BAD_READ)

    def read() -> None:
        room.storage.put("a", [b"good"])
        assert room.storage.get("a") != b"good"
        room.calm()
        assert room.storage.get("a") == b"good"

    room.run(read)


def of(room: Room) -> SimFiles:
    files = SimFiles(room.tasks, room.faults, 3)
    files.append("/in/a", b"one\n")
    files.append("/in/b", b"two\n")
    return files


def test_a_renamed_file_keeps_its_inode_and_an_open_one_is_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch)
    files = of(room)
    inode = files.stat("/in/a").st_ino

    def read() -> None:
        with files.opened("/in/a") as descriptor:
            files.rename("/in/a", "/in/a.1")
            files.append("/in/a", b"new\n")
            assert files.pread(descriptor, 9, 2) == b"e\n"
            assert files.fstat(descriptor).st_ino == inode

    room.run(read)
    assert files.siblings("/in/a") == [
        ("/in/a", files.stat("/in/a").st_ino),
        ("/in/a.1", inode),
        ("/in/b", files.stat("/in/b").st_ino),
    ]
    assert files.stat("/in/a").st_ino != inode
    assert list(files.below("/in", "**/*")) == ["/in/a", "/in/a.1", "/in/b"]
    assert list(files.matching("/in/b*")) == ["/in/b"]


@pytest.mark.parametrize(("path", "error"), [("/in/none", FileNotFoundError), ("/in/a", OSError)])
def test_what_cannot_be_opened_says_why(monkeypatch: pytest.MonkeyPatch, path: str, error: type[OSError]) -> None:
    room = Room(monkeypatch, *([Fault.GET_FAILS] if error is OSError else []))
    monkeypatch.setattr("headgate.sim.machine.files.FAILURE_RATE", 1.0)
    files = of(room)

    def read() -> None:
        with pytest.raises(error), files.opened(path):
            raise AssertionError("it is not open")

    read_it: Callable[[], None] = read
    room.run(read_it)
