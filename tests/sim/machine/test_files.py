"""Files of the machine room: they keep their inodes when they are renamed, and are never there half way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.sim.machine.test_storage import Room

from headgate.sim.machine.storage import SimFiles
from headgate.sim.machine.world import Fault


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
    monkeypatch.setattr("headgate.sim.machine.storage.FAILURE_RATE", 1.0)
    files = of(room)

    def read() -> None:
        with pytest.raises(error), files.opened(path):
            raise AssertionError("it is not open")

    read_it: Callable[[], None] = read
    room.run(read_it)
