"""Mutants of served stores: each breaks one promise about the way to the server, and a named test fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.servers.proxy import Wire
from tests.store.served import test_served_access as access
from tests.store.served import test_served_answers as answering
from tests.store.served import test_served_chunks as chunking
from tests.store.served import test_served_news as telling
from tests.store.served import test_served_settling as settlings
from tests.store.served import test_served_verbs as verbs
from tests.store.served.conftest import _stores_are_served, port, server, wire  # noqa: F401
from tests.store.served.serving import TOKEN, serving
from tests.store.served.test_served_chunks import storage  # noqa: F401

from headgate.store.served import address as addresses
from headgate.store.served import client as clients
from headgate.store.served import connection as asking
from headgate.store.served import failures, hearing
from headgate.store.served.client import Client, Settled
from headgate.store.served.connection import ServerConnection
from headgate.store.served.served_storage import ServedStorage
from headgate.store.serving import carrying, chunks, connections, place
from headgate.store.serving import desk as desks
from headgate.store.serving import server as servers
from headgate.store.serving.checking import Checking
from headgate.store.serving.connections import Connection
from headgate.store.serving.news import News
from headgate.store.serving.server import StoreServer
from headgate.store.serving.settling import Settling

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process:DeprecationWarning", "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PAUSES_S", (0.001, 0.02))
    monkeypatch.setattr(clients, "OPENING_PATIENCE_S", 0.0)
    monkeypatch.delenv(addresses.TOKEN_VARIABLE, raising=False)
    monkeypatch.delenv(addresses.TOKEN_FILE_VARIABLE, raising=False)


@contextmanager
def a_lost_answer_is_asked_for_again_as_if_it_only_read() -> Iterator[None]:
    """SS9: the verb is carried out twice."""
    real = Client.ask
    with patched(Client, "ask", lambda self, question, is_once=False: real(self, question, is_once=False)):
        yield


@contextmanager
def a_connection_that_was_ended_opens_itself() -> Iterator[None]:
    """SS3: and is not greeted."""
    real = ServerConnection._greet

    def greet(self: ServerConnection, *given: Any, **more: Any) -> Any:
        self._http.auto_open = 1
        return real(self, *given, **more)

    with patched(ServerConnection, "_greet", greet), patched(ServerConnection, "is_open", True):
        yield


@contextmanager
def a_late_question_is_carried_out() -> Iterator[None]:
    """SS9: whoever was told that it never will be, asks again."""
    with patched(Settling, "settle", lambda self, name, wait_s: Settled(is_over=True, is_void=True)):
        yield


@contextmanager
def nobody_waits_for_what_is_under_way() -> Iterator[None]:
    """SS9."""
    real = Settling.settle

    def settle(self: Settling, name: str, wait_s: float) -> Settled:
        found = real(self, name, 0)
        return found if found.is_over else Settled(is_over=True, is_void=True)

    with patched(Settling, "settle", settle):
        yield


@contextmanager
def a_new_process_of_the_server_says_that_nothing_was_done() -> Iterator[None]:
    """SS9: it cannot know."""
    real = Client._settled

    def settled(self: Client, connection: Any, lost: Any) -> Settled:
        if connection.facts.instance != lost.instance:
            return Settled(is_over=True, is_void=True)
        return real(self, connection, lost)

    with patched(Client, "_settled", settled):
        yield


@contextmanager
def an_answer_that_is_not_known_is_taken_for_never_asked() -> Iterator[None]:
    """SS9."""
    real = Settling.settle

    def settle(self: Settling, name: str, wait_s: float) -> Settled:
        found = real(self, name, wait_s)
        return Settled(is_over=True, is_void=True) if found.is_over and not found.status else found

    with patched(Settling, "settle", settle):
        yield


@contextmanager
def checks_have_the_same_numbers_in_every_process() -> Iterator[None]:
    """SS16."""
    real = Checking.__init__

    def init(self: Checking, check: Any, first: int = 1, *more: Any) -> None:
        real(self, check, 1, *more)

    with patched(Checking, "__init__", init):
        yield


@contextmanager
def any_store_is_the_one_that_was_opened() -> Iterator[None]:
    """SS11."""
    with patched(place, "_number", lambda storage: "the same for all"):
        yield


@contextmanager
def a_damaged_chunk_is_kept() -> Iterator[None]:
    """SS8."""
    real = connections.arriving

    def arriving(read: Any, size_bytes: int, checksum: str) -> Any:
        try:
            yield from real(read, size_bytes, checksum)
        except chunks.IncompleteError as error:
            if not error.is_whole:
                raise

    with patched(connections, "arriving", arriving):
        yield


@contextmanager
def half_a_chunk_is_kept() -> Iterator[None]:
    """SS8."""
    real = connections.arriving

    def arriving(read: Any, size_bytes: int, checksum: str) -> Any:
        try:
            yield from real(read, size_bytes, checksum)
        except chunks.IncompleteError as error:
            if error.is_whole:
                raise

    with patched(connections, "arriving", arriving), patched(chunking, "WAIT_S", 2):
        yield


@contextmanager
def a_chunk_is_read_at_once() -> Iterator[None]:
    """SS7."""
    with patched(chunks, "PIECE_BYTES", 64 << 20):
        yield


@contextmanager
def sizes_are_not_looked_at() -> Iterator[None]:
    """SS7."""
    with (
        patched(Connection, "_size", lambda self, most: self._number("Content-Length") or 0),
        patched(asking, "ANSWER_S", 2.0),
    ):
        yield


@contextmanager
def who_is_not_known_is_answered() -> Iterator[None]:
    """SS4."""

    def check(self: Connection) -> None:
        self._is_known = True

    with patched(Connection, "_check_head", check):
        yield


@contextmanager
def strangers_may_take_their_time() -> Iterator[None]:
    """SS4."""
    with patched(StoreServer, "end_strangers", lambda self, oldest: None), patched(access, "WAIT_S", 2):
        yield


@contextmanager
def strangers_make_no_room() -> Iterator[None]:
    """SS4."""

    def came(self: StoreServer, connection: Connection) -> None:
        with self._lock:
            self._strangers[connection] = (time.monotonic() + desks.GREETING_S) * 1_000
        self._counting.add(connections=1)

    with patched(StoreServer, "came", came), patched(access, "WAIT_S", 2):
        yield


@contextmanager
def any_site_may_call_this_machine() -> Iterator[None]:
    """SS4, PG5."""
    with patched(connections, "host_of", lambda header: "localhost"):
        yield


@contextmanager
def tokens_are_read_once() -> Iterator[None]:
    """SS2."""
    with patched(StoreServer, "tokens", lambda self: self._tokens):
        yield


@contextmanager
def others_need_no_token() -> Iterator[None]:
    """SS2."""
    with patched(servers, "_check_token", lambda options: None), patched(servers, "StoreServer", _never):
        yield


def _never(*_: Any) -> None:
    raise AssertionError("it would listen")


@contextmanager
def versions_are_not_compared() -> Iterator[None]:
    """SS5."""

    def check(self: Connection) -> None:
        return None

    with patched(Connection, "_check_head", check):
        yield


@contextmanager
def what_arrives_is_not_compared_with_what_was_sent() -> Iterator[None]:
    """SS6."""
    with a_damaged_chunk_is_kept():
        yield


@contextmanager
def any_method_is_a_verb() -> Iterator[None]:
    """SS6."""
    real = carrying.Carrying.carry_out

    def carry_out(self: Any, of: str, name: str, data: bytes) -> bytes:
        if (of, name) not in self._verbs:
            return b""
        return real(self, of, name, data)

    with patched(carrying.Carrying, "carry_out", carry_out):
        yield


@contextmanager
def errors_forget_that_output_is_gone() -> Iterator[None]:
    """SS18."""
    with patched(failures, "gone", lambda error: error):
        yield


@contextmanager
def everything_is_the_callers_own() -> Iterator[None]:
    """SS17."""
    with patched(carrying, "_mine", lambda judged: lambda owner: True):
        yield


@contextmanager
def who_cannot_hear_says_that_nothing_changed() -> Iterator[None]:
    """SS12."""
    real = hearing.Hearing.changes

    def changes(self: hearing.Hearing) -> int:
        return real(self) if self._hears or self._thread is None else 0

    with patched(hearing.Hearing, "changes", changes), patched(telling, "WAIT_S", 2):
        yield


@contextmanager
def own_changes_are_told_by_the_server_only() -> Iterator[None]:
    """SS12. It takes its time: it might be as quick as the process itself."""
    real = News.wait

    def wait(self: News, number: int, wait_s: float) -> int:
        found = real(self, number, wait_s)
        time.sleep(0.3)  # slow work: not a wait for anything
        return found

    with patched(hearing.Hearing, "changed_here", lambda self: None), patched(News, "wait", wait):
        yield


@contextmanager
def what_nobody_waited_for_is_not_looked_at() -> Iterator[None]:
    """SS12."""

    def wait(self: News, number: int, wait_s: float) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._number != number, wait_s)
            return self._number

    with patched(News, "wait", wait):
        yield


BY_WIRE: dict[Mutant, Any] = {
    a_lost_answer_is_asked_for_again_as_if_it_only_read: answering.test_a_verb_whose_answer_was_lost_is_done_once,
    an_answer_that_is_not_known_is_taken_for_never_asked: (
        answering.test_an_answer_that_nobody_knows_any_more_is_the_callers_to_look_up
    ),
}
BY_SETTLING: dict[Mutant, Any] = {
    a_late_question_is_carried_out: settlings.test_an_answer_is_kept_for_who_lost_it,
    nobody_waits_for_what_is_under_way: settlings.test_who_asks_for_what_is_under_way_waits_for_it,
    what_nobody_waited_for_is_not_looked_at: settlings.test_what_came_between_two_questions_for_news_is_heard,
}
BY_SERVER: dict[Mutant, Any] = {
    a_connection_that_was_ended_opens_itself: chunking.test_a_connection_that_the_server_has_ended_is_not_used_again,
    strangers_may_take_their_time: access.test_a_stranger_that_takes_too_long_is_closed,
    strangers_make_no_room: access.test_a_flood_of_strangers_keeps_no_client_out,
    versions_are_not_compared: access.test_another_version_is_refused_in_one_sentence,
    what_arrives_is_not_compared_with_what_was_sent: verbs.test_what_was_damaged_on_its_way_is_asked_again,
}
BY_CHUNKS: dict[Mutant, Any] = {
    a_damaged_chunk_is_kept: chunking.test_a_chunk_that_came_half_or_damaged_is_not_there,
    half_a_chunk_is_kept: chunking.test_a_chunk_that_came_half_or_damaged_is_not_there,
}


@pytest.mark.parametrize("mutant", BY_WIRE, ids=lambda mutant: mutant.__name__)
def test_what_is_wrong_with_lost_answers_is_caught(
    mutant: Mutant,
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test = BY_WIRE[mutant]
    needs_patch = "monkeypatch" in test.__code__.co_varnames[: test.__code__.co_argcount]
    assert_caught(mutant, test, *([wire, monkeypatch] if needs_patch else [wire]))


@pytest.mark.parametrize("mutant", BY_SETTLING, ids=lambda mutant: mutant.__name__)
def test_what_is_wrong_with_the_memory_of_the_server_is_caught(mutant: Mutant) -> None:
    assert_caught(mutant, BY_SETTLING[mutant])


@pytest.mark.parametrize("mutant", BY_SERVER, ids=lambda mutant: mutant.__name__)
def test_what_is_wrong_with_strangers_and_versions_is_caught(
    mutant: Mutant,
    server: StoreServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_caught(mutant, BY_SERVER[mutant], server, monkeypatch)


@pytest.mark.parametrize("mutant", BY_CHUNKS, ids=lambda mutant: mutant.__name__)
def test_what_is_wrong_with_chunks_is_caught(
    mutant: Mutant,
    server: StoreServer,
    storage: ServedStorage,
    tmp_path: Path,
) -> None:
    assert_caught(mutant, BY_CHUNKS[mutant], server, storage, tmp_path)


def test_large_pieces_are_caught(storage: ServedStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(a_chunk_is_read_at_once, chunking.test_a_chunk_passes_in_pieces, storage, monkeypatch)


def test_sizes_that_nobody_looks_at_are_caught(
    server: StoreServer,
    storage: ServedStorage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test = chunking.test_a_question_that_is_too_large_is_refused_before_it_is_read
    assert_caught(sizes_are_not_looked_at, test, server, storage, monkeypatch)


def test_that_a_new_process_knows_nothing_is_caught(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    test = answering.test_a_server_that_is_another_one_by_now_does_not_know
    assert_caught(a_new_process_of_the_server_says_that_nothing_was_done, test, tmp_path, port, monkeypatch)


def test_that_checks_are_told_apart_is_caught(tmp_path: Path) -> None:
    test = verbs.test_a_check_that_was_begun_in_another_process_is_none_of_this_one
    assert_caught(checks_have_the_same_numbers_in_every_process, test, tmp_path)


def test_that_stores_are_told_apart_is_caught(tmp_path: Path, port: int) -> None:
    test = answering.test_another_store_in_the_place_of_the_first_is_refused
    assert_caught(any_store_is_the_one_that_was_opened, test, tmp_path, port)


def test_that_strangers_are_told_nothing_is_caught(tmp_path: Path) -> None:
    sent = b"POST /verb/catalogue/list_streams HTTP/1.1\r\nHeadgate-Protocol: 3\r\nContent-Length: 0\r\n\r\n"
    with serving(tmp_path / "guarded", tokens=lambda: [TOKEN.encode()]) as guarded:
        assert_caught(who_is_not_known_is_answered, access.test_who_is_not_known_is_told_nothing, guarded, sent, b"401")


def test_that_pages_are_refused_is_caught(server: StoreServer) -> None:
    test = access.test_a_page_of_another_site_is_refused
    assert_caught(any_site_may_call_this_machine, test, server, "evil.example.com", True)


def test_that_tokens_are_looked_at_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(tokens_are_read_once, access.test_a_token_that_was_taken_out_is_right_no_more, tmp_path, monkeypatch)


def test_that_others_need_a_token_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(others_need_no_token, access.test_a_server_that_others_can_reach_wants_a_token, tmp_path, monkeypatch)


def test_that_only_verbs_are_called_is_caught(server: StoreServer) -> None:
    assert_caught(any_method_is_a_verb, verbs.test_what_is_no_question_is_refused, server, verbs.NO_QUESTIONS[1])


def test_that_errors_are_whole_is_caught() -> None:
    is_gone = next(error for error in verbs.ERRORS if error.is_output_gone)
    assert_caught(errors_forget_that_output_is_gone, verbs.test_errors_are_the_same_from_afar, is_gone)


def test_that_the_caller_decides_is_caught(tmp_path: Path) -> None:
    assert_caught(everything_is_the_callers_own, verbs.test_the_caller_says_what_is_its_own, tmp_path)


def test_that_a_deaf_reader_looks_is_caught(
    server: StoreServer,
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test = telling.test_a_reader_that_hears_nothing_looks_for_itself
    assert_caught(who_cannot_hear_says_that_nothing_changed, test, server, wire, monkeypatch)


def test_that_own_changes_are_seen_at_once_is_caught(server: StoreServer) -> None:
    test = telling.test_what_a_process_has_changed_its_readers_see_at_once
    assert_caught(own_changes_are_told_by_the_server_only, test, server)
