"""The verbs of a catalogue: each is one database transaction, which takes effect as a whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy.engine import Connection
from tests.conftest import few
from tests.store.storing import KEYED

from headgate.codec.chunk import PartEntry
from headgate.errors import StorageError
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.protocol.store.layouts import KEY_SPACE, Plan, ScalingPolicy, Unit
from headgate.protocol.store.reader_group import CheckpointAsked, Joined, Left, Passed
from headgate.protocol.store.transactions import Commit
from headgate.protocol.store.truncation import Hold
from headgate.store.catalogue import sql, tables
from headgate.store.catalogue.base import VERBS, Catalogue
from headgate.store.catalogue.records import AppendFound, ChunkRecord, GroupStart, Numbers, Reading, Shared
from headgate.store.catalogue.sql import memory_catalogue
from headgate.store.catalogue.sqlite import Database
from headgate.store.store import Store
from headgate.store.streams import RetentionPolicy, StreamDefinition, StreamInfo, StreamReset

OWNER = "p/sink"
READING = Reading("q/source", "life", 3)
LIFE = PipelineIdentity("a", "/a", "h", 1)
POLICY = ScalingPolicy(Unit.EVENTS, 1, 1, 8, 0)
SCALING = ScalingPolicy(Unit.BYTES, 9, 2, 3, 4)
LEASES_MS = {"open": 9_000, "overdue": 200}
RESET = StreamReset({"s": None, "quiet": (1, None, None)}, OWNER, 9, LIFE, OWNER)


def chunk(name: str) -> ChunkRecord:
    return ChunkRecord(name, 100, (PartEntry(0, 2, 0, 40, 1), PartEntry(1, 3, 64, 40, 2)))


def shared(stream: StreamInfo) -> Shared:
    return Shared(stream, "open", "writers", 0, LEASES_MS["open"])


def fill(made: Catalogue) -> None:
    """A stream ``s`` with something of everything, and a sealed one."""
    stream = made.create_stream(StreamDefinition("s", KEYED, 2, "key"), 1, if_not_exists=False)
    made.create_stream(StreamDefinition("sealed", KEYED, 1, None), 1, if_not_exists=False)
    made.seal_stream("sealed")
    made.register_writer(stream, "w", 1)
    made.append(stream, chunk("garbage"), None, 2)
    made.append(stream, chunk("truncated"), None, 2)
    made.append(stream, chunk("first"), Numbers("w", 1, 1, 4), 3)
    for name in ("committed", "prepared", "another"):
        made.prepare(stream, name, OWNER, 1, [chunk(name)], 5)
    made.commit([("s", "committed")], OWNER, 1, 6, {"s": 5})
    made.own("q/sink", LIFE)
    made.mark("s", OWNER, 1, 4)
    made.mark("s", OWNER, 2, 5)
    made.truncate(stream, {0: 2, 1: 3}, anyway=False)
    made.sweep(stream, 10)
    made.truncate(stream, {0: 4, 1: 6}, anyway=False)
    made.hold(stream, Hold("reader", {0: 5, 1: 6}))
    made.hold(stream, Hold("another", {0: 6, 1: 9}))
    made.hold(stream, Hold("reader group forgotten", {0: 6, 1: 9}))
    made.set_retention("s", RetentionPolicy(age_ms=1))
    made.set_scaling("s", POLICY)
    made.pass_segments(stream, Reading("q/source", "life", 2), [0])
    made.update_schema("s", pa.schema([pa.field("more", pa.int64())]), is_whole=False)
    made.create_group("g", ["s"], GroupStart(from_latest=True), 1)
    made.change_group("g", Joined("a", "a1", 1_000))
    made.change_group("g", CheckpointAsked("c"))
    made.change_group("g", Passed("a", "a1", "c", {}))
    for name in ("open", "overdue"):
        begun = made.begin_shared("s", name, "writers", 0, LEASES_MS[name], 5)
        made.join_shared(begun, "w", "t", 5)
        made.write_shared(begun, "w", "t", (1, 2), chunk(name), 5)
    made.expire_shared(stream, 1_000)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a filled store, to be copied."""
    directory = tmp_path_factory.mktemp("filled") / "store"
    with Store.open(directory) as store:
        fill(store._core.catalogue)
    return directory


@pytest.fixture(params=few(["file", "memory"], 1))
def catalogue(request: pytest.FixtureRequest, filled: Path, tmp_path: Path) -> Iterator[Catalogue]:
    if request.param == "file":
        shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
        with Store.open(tmp_path) as store:
            yield store._core.catalogue
    else:
        made = memory_catalogue("memory")
        fill(made)
        yield made


Call = Callable[[Catalogue, StreamInfo], object]

READS: dict[str, Call] = {
    "find_stream": lambda c, s: c.find_stream("s"),
    "describe_stream": lambda c, s: c.describe_stream("s"),
    "list_streams": lambda c, s: c.list_streams(""),
    "observe": lambda c, s: c.observe(replace(s, scaling=POLICY), 100),
    "schemas": lambda c, s: c.schemas(s),
    "layout": lambda c, s: c.layout("s"),
    "layout_and_extents": lambda c, s: c.layout_and_extents(s),
    "look": lambda c, s: c.look(s),
    "passed": lambda c, s: c.passed(s, READING),
    "find_append": lambda c, s: c.find_append("first"),
    "parts": lambda c, s: c.parts(s, 0, 5, 10),
    "extents": lambda c, s: c.extents(s),
    "cut_at": lambda c, s: c.cut_at(s, 3),
    "holds": lambda c, s: c.holds(s),
    "retention_cut": lambda c, s: c.retention_cut(s, 100),
    "frontier": lambda c, s: c.frontier("s", OWNER, 1, [0]),
    "find_group": lambda c, s: c.find_group("g"),
    "groups": lambda c, s: c.groups(),
    "group_cuts": lambda c, s: c.group_cuts("g", "c"),
    "group_unread": lambda c, s: c.group_unread("g"),
    "begin": lambda c, s: c.begin("s", "new", OWNER, 1),
    "transactions": lambda c, s: c.transactions(OWNER, "", None),
    "known_chunks": lambda c, s: c.known_chunks(["open", "unknown"]),
    "find_shared": lambda c, s: c.find_shared("s", "open"),
    "owner": lambda c, s: c.owner(OWNER),
    "chunk_paths": lambda c, s: c.chunk_paths(),
    "contents": lambda c, s: c.contents("s", OWNER, lambda owner: True),
}
WRITES: dict[str, Call] = {
    "create_stream": lambda c, s: c.create_stream(StreamDefinition("n", KEYED, 3, None), 9, if_not_exists=False),
    "update_schema": lambda c, s: c.update_schema("s", pa.schema([pa.field("new", pa.int32())]), is_whole=False),
    "scale_stream": lambda c, s: c.scale_stream("s", Plan(0, (0,), ((0, 5), (5, KEY_SPACE // 2))), 9),
    "set_scaling": lambda c, s: c.set_scaling("s", SCALING),
    "autoscale": lambda c, s: c.autoscale(replace(s, scaling=POLICY), Plan(0, (0,), ((0, 5), (5, KEY_SPACE // 2))), 9),
    "pass_segments": lambda c, s: c.pass_segments(s, READING, [0, 1]),
    "seal_stream": lambda c, s: c.seal_stream("quiet"),
    "delete_stream": lambda c, s: c.delete_stream("s", force=True),
    "register_writer": lambda c, s: c.register_writer(s, "w", 2),
    "append": lambda c, s: c.append(s, chunk("second"), Numbers("w", 1, 5, 5), 8),
    "note_time": lambda c, s: c.note_time(s, "writer:w", 9, 7, writer=("w", 1)),
    "forget_time": lambda c, s: c.forget_time(s, OWNER),
    "truncate": lambda c, s: c.truncate(s, {0: 6, 1: 9}, anyway=True),
    "retain": lambda c, s: c.retain(s, {0: 6, 1: 9}),
    "sweep": lambda c, s: c.sweep(s, 10),
    "swept": lambda c, s: c.swept(["garbage", "unknown"]),
    "condemn": lambda c, s: c.condemn(["second", "open", "garbage"]),
    "set_retention": lambda c, s: c.set_retention("s", RetentionPolicy(size_bytes=10)),
    "hold": lambda c, s: c.hold(s, Hold("reader", {0: 6, 1: 7})),
    "release": lambda c, s: c.release(s, "reader"),
    "mark": lambda c, s: c.mark("s", OWNER, 2, 6),
    "unmark": lambda c, s: c.unmark(OWNER, 2, 0, 5),
    "unmark_others": lambda c, s: c.unmark_others(OWNER, 2),
    "create_group": lambda c, s: c.create_group("h", ["s"], GroupStart(from_latest=True), 1),
    "change_group": lambda c, s: c.change_group("g", Left("a", "a1")),
    "reset_group": lambda c, s: c.reset_group("g", "r1", GroupStart(), "c"),
    "delete_group": lambda c, s: c.delete_group("g"),
    "mend_groups": lambda c, s: c.mend_groups(),
    "prepare": lambda c, s: c.prepare(s, "new", OWNER, 2, [chunk("new")], 7),
    "commit": lambda c, s: c.commit([("s", "prepared"), ("s", "another")], OWNER, 2, 7, {"s": 6}),
    "abort": lambda c, s: c.abort("s", "prepared", OWNER, 2, 7),
    "recover": lambda c, s: c.recover("sealed", OWNER, 2, {"another"}, 7),
    "fence": lambda c, s: c.fence(OWNER, 8),
    "forget_outcomes": lambda c, s: c.forget_outcomes(["committed"], OWNER, 2),
    "begin_shared": lambda c, s: c.begin_shared("s", "newly", "writers", 0, 500, 7),
    "join_shared": lambda c, s: c.join_shared(shared(s), "v", "t2", 7),
    "write_shared": lambda c, s: c.write_shared(shared(s), "w", "t", (3, 3), chunk("more"), 7),
    "ping_shared": lambda c, s: c.ping_shared(shared(s), 7),
    "decide_shared": lambda c, s: c.decide_shared(shared(s), Commit(), 7),
    "expire_shared": lambda c, s: c.expire_shared(s, 1_100),
    "own": lambda c, s: c.own("r/sink", LIFE),
    "forget_owner": lambda c, s: c.forget_owner("q/sink"),
    "start_over": lambda c, s: c.start_over(RESET, lambda owner: True, 7),
}

REFUSED_AGAIN = {"append", "create_stream", "delete_stream"}
"""Verbs whose repetition finds that they were carried out."""


def test_every_verb_is_tried_here() -> None:  # SS9
    assert VERBS.keys() == READS.keys() | WRITES.keys()
    assert {name for name, verb in VERBS.items() if verb.is_reading} == READS.keys()


def database(catalogue: Catalogue) -> Database:
    assert isinstance(catalogue, sql.SqlCatalogue)
    return catalogue._database


def content(catalogue: Catalogue) -> dict[str, list[Any]]:
    with database(catalogue).read() as connection:
        return {
            table.name: sorted((tuple(row) for row in connection.execute(table.select())), key=repr)
            for table in tables.metadata.sorted_tables
        }


def counted(catalogue: Catalogue, call: Call, patch: pytest.MonkeyPatch) -> list[str]:
    """The transactions that a verb begins."""
    begun: list[str] = []
    stream = catalogue.find_stream("s")
    where = database(catalogue)
    for kind in ("read", "write"):
        real = getattr(where, kind)

        @contextlib.contextmanager
        def counting(kind: str = kind, real: Any = real) -> Iterator[Connection]:
            begun.append(kind)
            with real() as connection:
                yield connection

        patch.setattr(where, kind, counting)
    call(catalogue, stream)
    patch.undo()
    return begun


def test_a_verb_that_asks_is_one_transaction_and_changes_nothing(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(catalogue)
    for verb, call in READS.items():
        assert counted(catalogue, call, monkeypatch) == ["read"], verb
        assert content(catalogue) == before, verb


def break_at_the_end(catalogue: Catalogue, patch: pytest.MonkeyPatch) -> None:
    """Every transaction that writes fails when all is written, before it is committed."""
    real = database(catalogue).write

    @contextlib.contextmanager
    def breaking() -> Iterator[Connection]:
        with real() as connection:
            yield connection
            raise StorageError("write", "catalogue", "no space left")

    patch.setattr(database(catalogue), "write", breaking)


def test_a_verb_that_fails_leaves_nothing(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:  # S13
    catalogue.create_stream(StreamDefinition("quiet", KEYED, 1, None), 1, if_not_exists=False)
    before, stream = content(catalogue), catalogue.find_stream("s")
    break_at_the_end(catalogue, monkeypatch)
    for verb, call in WRITES.items():
        with pytest.raises(StorageError, match="no space left"):
            call(catalogue, stream)
        assert content(catalogue) == before, verb


@pytest.mark.parametrize("verb", WRITES)
def test_a_verb_that_changes_is_one_transaction_and_can_be_repeated(
    catalogue: Catalogue, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # S13, TX1
    """When its answer was lost, the same verb changes nothing more."""
    check_repeated(catalogue, verb, monkeypatch)


def check_repeated(catalogue: Catalogue, verb: str, patch: pytest.MonkeyPatch) -> None:
    catalogue.create_stream(StreamDefinition("quiet", KEYED, 1, None), 1, if_not_exists=False)
    before, stream = content(catalogue), catalogue.find_stream("s")
    assert counted(catalogue, WRITES[verb], patch) == ["write"]
    once = content(catalogue)
    assert once != before
    if verb not in REFUSED_AGAIN:
        WRITES[verb](catalogue, stream)
        assert content(catalogue) == once


def test_an_append_whose_answer_was_lost_is_found(catalogue: Catalogue) -> None:
    stream = catalogue.find_stream("s")
    assert catalogue.find_append("second") == AppendFound()
    starts = catalogue.append(stream, chunk("second"), None, 9)
    assert starts == {0: 8, 1: 12}
    assert catalogue.find_append("second") == AppendFound({0: 10, 1: 15})


def hear(catalogue: Catalogue, before: int) -> None:
    """Wait until it is heard that something was changed: a server tells a moment later."""
    deadline = time.monotonic() + 300
    while catalogue.changes() == before and time.monotonic() < deadline:
        time.sleep(0.001)


def test_the_version_tells_that_another_one_changed_something(catalogue: Catalogue, tmp_path: Path) -> None:
    before = catalogue.changes()
    assert catalogue.changes() == before
    catalogue.find_stream("s")
    assert catalogue.changes() == before
    if catalogue.path == "memory":
        catalogue.fence("another", 1)
    else:
        with Store.open(tmp_path) as other:
            other.transactions.fence("another", 1)
    hear(catalogue, before)
    assert catalogue.changes() != before


def test_a_view_for_a_check_is_of_one_moment(store: Store) -> None:
    with store._core.catalogue.audit() as audit:
        assert len(audit.streams()) == 1
        with Store.open(store.root) as other:
            other.create_stream("meanwhile", KEYED)
            assert len(other.list_streams()) == 2
        assert len(audit.streams()) == 1
        assert audit.problems() == []


def test_names_in_capitals_are_other_names(catalogue: Catalogue) -> None:
    for name in ("app/x", "App/x", "app_/x"):
        catalogue.create_stream(StreamDefinition(name, KEYED, 1, None), 1, if_not_exists=False)
    assert [info.name for info in catalogue.list_streams("app")] == ["app/x"]
    assert [info.name for info in catalogue.list_streams("App")] == ["App/x"]
    catalogue.own("Q/sink", LIFE)
    catalogue.prepare(catalogue.find_stream("app/x"), "T-1", "Q/sink", 1, [], 7)
    assert [found.name for found in catalogue.transactions(None, "T-", None)] == ["T-1"]
    assert catalogue.transactions(None, "t-", None) == []
