"""Every verb from afar: what it takes and gives, its errors, and what is no verb."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.servers.proxy import Wire
from tests.store.catalogue import test_sql as verbs
from tests.store.served.serving import over
from tests.store.storing import KEYED, STREAM, drained, in_a_child, keyed

from headgate import errors
from headgate.errors import (
    CorruptionError,
    FencedError,
    ProtocolViolation,
    StorageError,
    TruncatedError,
    UsageError,
    gone,
)
from headgate.model.pipeline_identity import Owner, PipelineIdentity
from headgate.storage.local import LocalStorage
from headgate.store.addresses import parse_server_url
from headgate.store.catalogue.base import VERBS, Catalogue
from headgate.store.catalogue.sql import memory_catalogue
from headgate.store.catalogue.tables import CATALOGUE_VERSION
from headgate.store.client import connection as asking
from headgate.store.client import connection as clients
from headgate.store.client.connection import Client, Request, Response, ServerFacts
from headgate.store.client.messages import (
    CATALOGUE_SIGNATURES,
    PROTOCOL_VERSION,
    STORAGE_SIGNATURES,
    Failure,
    decode,
    decode_failure,
    encode,
    encode_failure,
)
from headgate.store.client.remote_store import CHECK, CheckRequest, CheckResult, RemoteCatalogue, open_remote_store
from headgate.store.server import connections as answering
from headgate.store.server.handlers import RequestHandlers, ServerMetrics
from headgate.store.server.server import ServerOptions, StoreServer, serve_store
from headgate.store.store import Store
from headgate.store.streams import OtherLayoutError, RemovedFileError, StreamDefinition


@contextmanager
def afar(root: Path) -> Iterator[tuple[Catalogue, Catalogue]]:
    """A catalogue from afar, and the same on the spot."""
    behind = memory_catalogue("memory")
    options = ServerOptions("127.0.0.1", 0)
    with serve_store(root, behind, LocalStorage(root / "chunks"), options) as server:
        catalogue = open_remote_store(server.address.url).catalogue
        yield catalogue, behind
        catalogue.close()


def told(value: Any) -> str:
    """A value as text, whatever order its sets have."""
    if isinstance(value, set | frozenset):
        return f"set({sorted(map(told, value))})"
    return repr(value)


def test_every_verb_is_offered() -> None:
    assert CATALOGUE_SIGNATURES.keys() == VERBS.keys()


class Near(Client):
    """A client that needs no connection: all that it says is bytes nevertheless."""

    def __init__(self, answers: RequestHandlers) -> None:
        super().__init__(parse_server_url("headgate://localhost:1"))
        self._answers = answers
        self._facts = ServerFacts("", "", "/srv")

    def ask(self, question: Request, *, is_once: bool = False, may_repeat: bool = False) -> bytes:
        data = b"".join(bytes(part) for part in question.parts)
        return self._result_of(Response(*self._answers.answer(question.path, None, data)))


@contextmanager
def near(root: Path) -> Iterator[tuple[Catalogue, Catalogue]]:
    """The same without a server."""
    behind = memory_catalogue("memory")
    answers = RequestHandlers(behind, LocalStorage(root), "", ServerMetrics())
    yield RemoteCatalogue(Near(answers)), behind
    answers.close()


def test_a_store_is_filled_from_afar(tmp_path: Path) -> None:
    here = memory_catalogue("memory")
    verbs.fill(here)
    with afar(tmp_path) as (there, behind):
        verbs.fill(there)
        assert verbs.content(behind) == verbs.content(here)


def test_every_verb_that_asks_answers_from_afar_as_it_does_here(tmp_path: Path) -> None:
    with near(tmp_path) as (there, behind):
        verbs.fill(behind)
        for name, call in verbs.READS.items():
            found = [told(call(catalogue, catalogue.find_stream("s"))) for catalogue in (there, behind)]
            assert found[0] == found[1], name


def test_every_verb_that_changes_does_from_afar_what_it_does_here(tmp_path: Path) -> None:
    """One after the other, with a new pair of catalogues where what came before leaves a verb nothing to change."""
    with ExitStack() as opened:

        def filled() -> tuple[Catalogue, Catalogue, Catalogue]:
            here, (there, behind) = memory_catalogue("memory"), opened.enter_context(near(tmp_path))
            for catalogue in (here, behind):
                verbs.fill(catalogue)
                catalogue.create_stream(StreamDefinition("quiet", KEYED, 1, None), 1, if_not_exists=False)
            return here, there, behind

        here, there, behind = filled()
        for name, call in verbs.WRITES.items():
            answer = changed(here, call)
            if answer is None:
                here, there, behind = filled()
                answer = changed(here, call)
            assert told(call(there, there.find_stream("s"))) == answer, name
            assert verbs.content(behind) == verbs.content(here), name


def changed(catalogue: Catalogue, call: verbs.Call) -> str | None:
    """Return what a verb answers; None if it is refused or changes nothing."""
    before = verbs.content(catalogue)
    with suppress(errors.HeadgateError):
        answer = told(call(catalogue, catalogue.find_stream("s")))
        return None if verbs.content(catalogue) == before else answer
    return None


def test_what_is_sent_is_what_its_version_says() -> None:
    """A change of a type that a verb is declared with, or of the tables, raises ``PROTOCOL_VERSION``."""
    signatures = [*CATALOGUE_SIGNATURES.values(), *STORAGE_SIGNATURES.values()]
    shapes = {
        f"{x.name} {kind}": shape_of(of)
        for x in signatures
        for kind, of in {
            "takes": x.takes,
            "gives": x.gives,
            **{k: v for kinds in x.kinds.values() for k, v in kinds.items()},
        }.items()
    }
    text = json.dumps(shapes, sort_keys=True)
    found = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert (PROTOCOL_VERSION, CATALOGUE_VERSION, found) == (4, 2, "024100d95d48c98a")


def shape_of(of: Any) -> Any:
    """What msgspec knows of a type: names, types and defaults of all fields below it."""
    schema, parts = msgspec.json.schema_components([of], schema_hook=lambda special: {"special": special.__name__})
    return [without_words(schema), without_words(parts)]


def without_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_words(x) for key, x in value.items() if key not in ("description", "title")}
    return [without_words(x) for x in value] if isinstance(value, tuple | list) else value


ERRORS = [
    UsageError("no such stream"),
    OtherLayoutError("scaled"),
    RemovedFileError("removed"),
    FencedError("p/sink", 1, 2),
    TruncatedError("s", 1, 2, 3),
    CorruptionError("/a/chunk", 4, "this", "that"),
    gone(CorruptionError("/a/chunk", 4, "this", "that")),
    StorageError("write", "/a", "no space", is_transient=True),
    StorageError("write", "/a", "no right", is_transient=False),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_errors_are_the_same_from_afar(error: errors.HeadgateError) -> None:  # SS18
    data = encode_failure(error)
    assert data is not None
    found = decode_failure(data, "/srv/store", "headgate://h:1")
    assert type(found) is type(error)
    assert found.args == error.args
    assert str(found) == str(error)
    assert isinstance(found, errors.HeadgateError)
    assert found.is_output_gone is error.is_output_gone


@pytest.mark.parametrize("failure", [Failure("Unknown"), Failure("StorageError", ("what",)), Failure("FencedError")])
def test_an_error_that_cannot_be_is_refused(failure: Failure) -> None:  # SS18
    with pytest.raises(ProtocolViolation, match="an error"):
        decode_failure(encode(failure), "/srv/store", "headgate://h:1")


def test_numbers_of_every_kind_are_sent_and_nothing_that_is_no_value() -> None:
    assert encode(np.int64(5)) == encode(5)
    with pytest.raises(NotImplementedError, match="a object cannot be sent"):
        encode({"a": object()})


def test_a_user_is_told_of_the_store_by_the_name_that_he_knows(server: StoreServer) -> None:  # SS18
    with Store.open(server.address.url) as store, pytest.raises(UsageError, match=f"at {server.address.url} "):
        store.find("nothing")


def test_a_mistake_of_the_server_is_told_and_it_goes_on(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # SS18
    def mistaken(*_: object) -> None:
        raise AssertionError("a bug")

    carrying = server._answers._carrying
    with Store.open(server.address.url) as store:
        signature, _ = carrying._verbs["catalogue", "look"]
        monkeypatch.setitem(carrying._verbs, ("catalogue", "look"), (signature, lambda **_: mistaken()))
        info = store.find(STREAM)
        with pytest.raises(StorageError, match="AssertionError: a bug") as caught:
            store._core.catalogue.look(info)
        assert not caught.value.is_transient
        assert store.find(STREAM) == info
    assert "could not answer" in caplog.text
    assert server.counts.failures == 1


NO_QUESTIONS = [
    Request("POST", "/verb/catalogue/close", [encode({})]),
    Request("POST", "/verb/catalogue/_database", [encode({})]),
    Request("POST", "/verb/os/system", [encode({})]),
    Request("POST", "/verb/catalogue/find_stream", [encode({"name": 5})]),
    Request("POST", "/verb/catalogue/find_stream", [encode({})]),
    Request("POST", "/verb/catalogue/find_stream", [b"\xc1 no msgpack"]),
    Request("POST", "/verb/catalogue/change_group", [encode({"name": "g", "event": ["Unknown", {}]})]),
    Request("POST", "/verb/catalogue/change_group", [encode({"name": "g", "event": ["Left", {"reader": 1}]})]),
    Request("POST", "/settle", [encode(5)]),
    Request("POST", "/nothing"),
    Request("GET", "/nothing"),
    Request("PUT", "/chunk/../../etc/passwd", [b"x"]),
    Request("GET", "/chunk//etc/passwd"),
    Request("GET", "/chunk/a/b.chunk", headers={"Headgate-Offset": "-1", "Headgate-Size": "5"}),
    Request("PUT", "/chunk/a/b.chunk", [b"x"], {"Transfer-Encoding": "chunked"}),
    Request("DELETE", "/chunk/a"),
]


@pytest.mark.parametrize("question", NO_QUESTIONS, ids=lambda one: f"{one.method} {one.path}")
def test_what_is_no_question_is_refused(server: StoreServer, question: Request) -> None:
    client = Client(server.address)
    connection = client.connect()
    answer = connection.ask(question)
    assert answer.status >= 400
    assert answer.status != 500
    connection.close()
    with Store.open(server.address.url) as store:
        assert store.find(STREAM).name == STREAM


def test_texts_that_cannot_be_sent_are_refused(server: StoreServer) -> None:
    with Store.open(server.address.url) as store, pytest.raises(UsageError, match="cannot be sent"):
        store.find("\ud800")


def test_what_was_damaged_on_its_way_is_asked_again(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    real, damaged, asked = asking.checksum_of, [1], [0]

    def once_wrong(*parts: Any) -> str:
        is_question = any(b"if_not_exists" in bytes(part) for part in parts)
        asked[0] += is_question
        if is_question and damaged:
            damaged.pop()
            return "0" * 16
        return real(*parts)

    with Store.open(server.address.url) as store:
        monkeypatch.setattr(asking, "checksum_of", once_wrong)
        assert store.create_stream("one", KEYED).name == "one"
        assert (damaged, asked) == ([], [2])


def test_an_answer_that_was_damaged_is_asked_for_again(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:  # SS9
    with Store.open(server.address.url) as store:
        store.changes()
        real, damaged = answering.checksum_of, [1]

        def once_wrong(data: bytes) -> str:
            if b"created_ms" in data and damaged:
                damaged.pop()
                return "0" * 16
            return real(data)

        monkeypatch.setattr(answering, "checksum_of", once_wrong)
        assert store.create_stream("one", KEYED).name == "one"
        assert not damaged


def test_the_caller_says_what_is_its_own(tmp_path: Path) -> None:
    with afar(tmp_path) as (there, behind):
        verbs.fill(there)
        asked: list[Owner] = []

        def mine(owner: Owner) -> bool:
            asked.append(owner)
            return owner.life is not None and owner.life.id == verbs.LIFE.id

        found = there.contents("s", "", mine)
        assert len(asked) > 1
        assert len(set(asked)) == len(asked), "each of them once"
        assert found == behind.contents("s", "", mine)
        before = verbs.content(behind)

        def nobody(owner: Owner) -> bool:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            there.start_over(replace(verbs.RESET, of=""), nobody, 7)
        assert verbs.content(behind) == before, "nothing is changed before the caller has spoken"


def test_a_child_asks_on_connections_of_its_own(server: StoreServer) -> None:
    with Store.open(server.address.url) as store:
        store.changes()
        client = store._core.catalogue._client  # type: ignore[attr-defined]

        def append() -> None:
            with store.writer(STREAM) as writer:
                writer.append(keyed(("a", 1)))

        with client._lock:
            in_a_child(append)
        store.seal(STREAM)
        assert drained(store) == [("a", 1)]


def test_a_served_store_is_checked_by_its_server(server: StoreServer, tmp_path: Path) -> None:
    with Store.open(server.address.url) as store:
        with store.writer(STREAM, linger=None) as writer:
            writer.append(keyed(("a", 1), ("b", 2)))
        assert store.fsck() == []
        (chunk,) = (tmp_path / "served" / "chunks").rglob("*.chunk")
        data = bytearray(chunk.read_bytes())
        data[100] ^= 1
        chunk.write_bytes(data)
        assert any(problem.where.startswith(STREAM) for problem in store.fsck())
        assert store.fsck(verify_events=False) == []
        with pytest.raises(UsageError, match="checked by its server"):
            store._core.catalogue.audit()


def test_a_check_that_ends_in_a_mistake_is_no_sound_store(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: object, **__: object) -> None:
        raise TypeError("a mistake")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(server._answers._checking, "_check", mistaken)
    with (
        Store.open(server.address.url) as store,
        pytest.raises(StorageError, match="the server made a mistake: TypeError"),
    ):
        store.fsck()


def test_a_check_that_was_begun_in_another_process_is_none_of_this_one(tmp_path: Path) -> None:
    """Of a server that was started again: else its client would be told what others had checked, and how."""

    def begun(*, verify_events: bool) -> int:
        answers = RequestHandlers(memory_catalogue("memory"), LocalStorage(tmp_path), "", ServerMetrics())
        status, found = answers.answer(CHECK, None, encode(CheckRequest(0, verify_events)))
        answers.close()
        assert status == 200
        return decode(found, CheckResult).number

    assert begun(verify_events=True) != begun(verify_events=False)


def test_the_date_is_that_of_the_servers_machine(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        def wall_ms(self) -> int:
            return 1_000_000

    monkeypatch.setattr(server._answers, "_clock", Clock())
    with Store.open(server.address.url) as store:
        made = store.create_stream("dated", KEYED)
        assert 1_000_000 <= made.created_ms < 1_000_000 + 120_000


def test_life_is_sent_whole() -> None:
    life = PipelineIdentity("a", "/a", "h", 1)
    assert decode(encode(life), PipelineIdentity) == life
    with pytest.raises(errors.ProtocolViolation):
        decode(encode({"id": 1}), PipelineIdentity)


def test_a_wire_that_is_cut_is_not_noticed(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:  # SS9
    monkeypatch.setattr(clients, "PAUSES_S", (0.001, 0.01))
    with over(wire) as store, store.writer(STREAM, linger=None) as writer:
        for number in range(5):
            writer.append(keyed(("a", number)))
            wire.cut()
            writer.flush()
            wire.cut()
            assert len(drained(store)) == number + 1
        store.seal(STREAM)
