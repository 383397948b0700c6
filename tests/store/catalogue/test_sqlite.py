"""The catalogue: every commit is synced, opening waits for nobody for ever."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.store.storing import KEYED, STREAM, database_of, drained, in_a_child, keyed

from headgate.errors import StorageError
from headgate.store.catalogue import sql
from headgate.store.catalogue.sqlite import Database
from headgate.store.store import Store

SYNCS = {"x86_64": (74, 75), "aarch64": (82, 83)}
"""Numbers of the system calls fsync and fdatasync."""


def levels(database: Database) -> set[int]:
    """PRAGMA synchronous of several connections at once; 2 is FULL."""
    with ExitStack() as stack:
        found = [stack.enter_context(database.read()) for _ in range(6)]
        found.append(stack.enter_context(database.write()))
        return {connection.exec_driver_sql("PRAGMA synchronous").scalar_one() for connection in found}


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_every_connection_syncs_every_commit(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:

        def check() -> None:
            assert levels(database_of(store)) == {2}

        check()
        in_a_child(check)
    with Store.open(tmp_path / "store") as again:
        assert levels(database_of(again)) == {2}


def break_syncs() -> None:
    """Have the kernel fail every fsync and fdatasync of this thread with an I/O error, from now on."""

    def instruction(code: int, if_so: int, if_not: int, value: int) -> bytes:
        return struct.pack("HBBI", code, if_so, if_not, value)

    fsync, fdatasync = SYNCS[platform.machine()]
    program = b"".join(
        [
            instruction(0x20, 0, 0, 0),  # load the number of the system call
            instruction(0x15, 1, 0, fsync),
            instruction(0x15, 0, 1, fdatasync),
            instruction(0x06, 0, 0, 0x00050000 | 5),  # errno EIO
            instruction(0x06, 0, 0, 0x7FFF0000),  # allow
        ]
    )
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, ctypes.create_string_buffer(header, len(header)), 0, 0) == 0  # filter system calls
    with pytest.raises(OSError, match="Input/output error"), open(os.devnull) as file:
        os.fsync(file.fileno())


@pytest.mark.skipif(platform.machine() not in SYNCS, reason="numbers of system calls are known for two machines")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_commit_that_cannot_be_synced_is_not_acknowledged(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        store.create_stream(STREAM, KEYED, segments=1)
        transaction = store.transactions.begin(STREAM, owner="p", epoch=1, name="t")
        transaction.write(keyed(("a", 1)))
        transaction.prepare()

        def commit_without_syncs() -> None:
            break_syncs()
            with pytest.raises(StorageError, match="disk I/O error"):
                store.commit_transactions([(STREAM, "t")], owner="p", epoch=1)

        in_a_child(commit_without_syncs)
        store.commit_transactions([(STREAM, "t")], owner="p", epoch=1)
        assert drained(store) == [("a", 1)]
        assert store.fsck() == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_a_lock_that_somebody_holds_does_not_keep_a_store_from_opening(tmp_path: Path, kind: int) -> None:
    Store.open(tmp_path / "store").close()
    with open(tmp_path / "store" / "catalogue.lock", "rb") as held:
        fcntl.flock(held, kind)
        with Store.open(tmp_path / "store") as store:
            store.create_stream(STREAM, KEYED)


@pytest.mark.timeout(60)
def test_making_a_store_does_not_wait_for_ever_and_says_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "LOCK_TIMEOUT_S", 0.05)
    (tmp_path / "store").mkdir()
    with open(tmp_path / "store" / "catalogue.lock", "wb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        with pytest.raises(StorageError, match=rf"(process {os.getpid()} \(|another process).* has held the lock"):
            Store.open(tmp_path / "store")
    Store.open(tmp_path / "store").close()
