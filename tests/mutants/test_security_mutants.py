"""Ways to leave files and connections open to those who should not read, hold or change them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.codec import test_handshake
from tests.mutants.harness import assert_caught, patched
from tests.runtime.driver import test_asking
from tests.runtime.wire import test_connection_attacks, test_connection_tls
from tests.state.rocksdb import test_rocksdb_files
from tests.storage import test_access

from headgate.codec.frame_mac import FrameMac
from headgate.codec.handshake import Handshake
from headgate.model.security import Access
from headgate.runtime.driver import asking
from headgate.runtime.wire.connection import Connection
from headgate.runtime.wire.listener import Listener
from headgate.storage import access, own_directory
from headgate.tls import Tls


@pytest.fixture(autouse=True)
def _permissive() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@contextmanager
def files_are_world_readable() -> Iterator[None]:
    with patched(access, "FILE_MODES", dict.fromkeys(Access, 420)):
        yield


@contextmanager
def directories_are_world_readable() -> Iterator[None]:
    with patched(access, "DIRECTORY_MODES", dict.fromkeys(Access, 493)):
        yield


@contextmanager
def answers_have_the_modes_of_the_umask() -> Iterator[None]:
    with patched(asking, "write_created", lambda path, data, access: path.write_bytes(data)):
        yield


@contextmanager
def the_umask_cuts_the_group_off() -> Iterator[None]:
    with patched(os, "fchmod", lambda descriptor, mode: None):
        yield


@contextmanager
def any_directory_in_tmp_is_ours() -> Iterator[None]:
    with patched(own_directory, "refuse_strangers", lambda directory: None):
        yield


# SE7
@pytest.mark.parametrize("kind", ["state", "reading"])
@pytest.mark.parametrize("is_link", [False, True])
def test_a_directory_of_another_user_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_link: bool
) -> None:
    test = test_rocksdb_files.test_a_directory_that_another_user_has_made_takes_no_state
    assert_caught(any_directory_in_tmp_is_ours, test, tmp_path, monkeypatch, kind, is_link)


# SE1
@pytest.mark.parametrize("mutant", [files_are_world_readable, directories_are_world_readable])
def test_wider_modes_are_caught(mutant: object, tmp_path: Path) -> None:
    assert_caught(mutant, test_access.test_objects_are_their_owners_alone_under_a_permissive_umask, tmp_path / "a")  # type: ignore[arg-type]
    test_access.test_objects_are_their_owners_alone_under_a_permissive_umask(tmp_path / "b")


# SE1
def test_a_write_ahead_log_for_everybody_is_caught(tmp_path: Path) -> None:
    test = test_access.test_a_store_is_private_with_its_write_ahead_log
    assert_caught(files_are_world_readable, test, tmp_path / "a", "owner", 0o600, 0o700)
    test(tmp_path / "b", "owner", 0o600, 0o700)


# SE2
def test_answers_for_everybody_are_caught(tmp_path: Path) -> None:
    test = test_asking.test_questions_and_answers_are_for_who_may_write_there
    assert_caught(answers_have_the_modes_of_the_umask, test, tmp_path, 0o022, 0o700, 0o600)


def test_a_group_that_the_umask_cuts_off_is_caught(tmp_path: Path) -> None:
    test = test_access.test_a_directory_that_is_shared_with_its_group_says_so_to_all_that_write_there
    (tmp_path / "a").mkdir()
    assert_caught(the_umask_cuts_the_group_off, test, tmp_path / "a", 0o022)


# SE4
def test_a_lock_that_stays_readable_is_caught(tmp_path: Path) -> None:
    assert_caught(
        the_umask_cuts_the_group_off, test_access.test_a_lock_that_everybody_could_read_is_closed_to_them, tmp_path
    )


@contextmanager
def tags_are_not_checked() -> Iterator[None]:
    with patched(Connection, "_check_tag", lambda self, mac, view: None):
        yield


@contextmanager
def every_block_has_the_same_number() -> Iterator[None]:
    with patched(FrameMac, "_nonce", lambda self: bytes(12)):
        yield


@contextmanager
def tls_is_off_unless_asked_for() -> Iterator[None]:
    with patched(Tls, "applies_to", lambda self, host: bool(self._config.tls)):
        yield


@contextmanager
def the_certificate_is_not_proved() -> Iterator[None]:
    with patched(Handshake, "bind", lambda self, certificate: None):
        yield


@contextmanager
def a_flood_closes_the_oldest_of_all() -> Iterator[None]:
    """As version 0.1 did: whoever has begun makes room like a stranger."""
    know = Listener._know

    def known_but_no_better(self: Listener, stream: socket.socket, nonce: bytes) -> None:
        know(self, stream, nonce)
        self._strangers = {stream: None, **self._strangers}

    with patched(Listener, "_know", known_but_no_better):
        yield


@contextmanager
def strangers_are_believed() -> Iterator[None]:
    with patched(Handshake, "_voucher", lambda self, nonce: bytes(32)):
        yield


# SE13
@pytest.mark.parametrize("attack", ["changed", "inserted"])
def test_tags_that_nobody_checks_are_caught(attack: str) -> None:
    assert_caught(tags_are_not_checked, test_connection_attacks.read_under_attack, attack)


# SE13
@pytest.mark.parametrize("attack", ["repeated", "moved", "left out"])
def test_blocks_without_a_number_are_caught(attack: str) -> None:
    assert_caught(every_block_has_the_same_number, test_connection_attacks.read_under_attack, attack)


# SE14
def test_tls_that_is_off_by_default_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    test = test_connection_tls.test_a_listener_for_other_machines_speaks_tls_without_being_told
    assert_caught(tls_is_off_unless_asked_for, test, monkeypatch)


# SE15
def test_a_certificate_that_nobody_proves_is_caught() -> None:
    test = test_connection_attacks.test_somebody_in_between_with_a_certificate_of_its_own_is_refused
    assert_caught(the_certificate_is_not_proved, test)


# SE10
def test_a_flood_that_pushes_out_who_has_begun_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(
        a_flood_closes_the_oldest_of_all,
        test_connection_attacks.test_a_handshake_that_has_begun_survives_a_flood,
        monkeypatch,
    )


# SE10
def test_a_voucher_that_proves_nothing_is_caught() -> None:
    test = test_handshake.test_a_first_message_without_the_secret_is_refused_at_once
    assert_caught(strangers_are_believed, test)
