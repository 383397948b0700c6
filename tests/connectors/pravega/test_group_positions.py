"""Reader groups of Pravega's Java client: beginning where one is, and groups that follow a pipeline, judged by Java."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests import servers
from tests.runtime.runs.test_storages import WAIT_S, Watching
from tests.servers.kafka import java as java_command
from tests.servers.pravega import LIBRARIES, OPENED, SCOPE, PravegaServer, read_all

import headgate as hg
from headgate import testing
from headgate.connectors.base import HoldContext
from headgate.connectors.pravega import reader_group
from headgate.connectors.pravega.controller import StreamName
from headgate.connectors.pravega.group_state import newest_mark, numbers_in, state_after
from headgate.connectors.pravega.scaled_stream import Position
from headgate.connectors.pravega.source import Pravega
from headgate.connectors.pravega.stream_log import SegmentLog
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import FencedError, PipelineFailed, UsageError
from headgate.model.ids import CheckpointId, Generation

PROGRAM = Path(servers.__file__).with_name("PravegaJudge.java")
PATIENCE_S = 600
EVENT = 8 + 2
"""Bytes of an event of two characters."""
HOLDER = HoldContext("p", "in", "life", Generation(1))
Judge = Callable[..., list[str]]

pytestmark = [
    pytest.mark.xdist_group("pravega"),
    pytest.mark.skipif(shutil.which("javac") is None, reason="there is no Java compiler (a JDK has one)"),
]


def run(*command: str) -> list[str]:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr[-3_000:]
    return ran.stdout.splitlines()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """Runs the program, which is compiled once."""
    classes = tmp_path_factory.mktemp("classes")
    silent = '<statusListener class="ch.qos.logback.core.status.NopStatusListener"/>'
    (classes / "logback.xml").write_text(f"<configuration>{silent}</configuration>")
    run("javac", "-d", str(classes), "-cp", f"{LIBRARIES}/*", str(PROGRAM))
    opened = [part for name in OPENED for part in ("--add-opens", f"{name}=ALL-UNNAMED")]
    path = f"{classes}:{LIBRARIES}/*"
    return partial(run, java_command(), "-XX:TieredStopAtLevel=1", "-Xmx256m", *opened, "-cp", path, PROGRAM.stem)


@pytest.fixture
def judge(program: Judge, pravega: PravegaServer) -> Judge:
    """Calls a command for a group."""
    return lambda command, group, *rest: program(command, pravega.address, SCOPE, group, *rest)


def group_name() -> str:
    return f"g-{uuid.uuid4().hex[:12]}"


def filled(server: PravegaServer, segments: int = 1, count: int = 30) -> str:
    """Return a stream with events of two characters."""
    stream = server.create_stream(segments)
    events = [f"{number:02}" for number in range(count)]
    server.write(stream, events, events)
    return stream


def source_of(server: PravegaServer, stream: str, **options: Any) -> Pravega:
    made = Pravega(server.address, stream, format="text", **options)
    made.schema()
    return made


def at(stream: str, offsets: Mapping[int, int]) -> dict[str, bytes]:
    """Return positions as a checkpoint has them."""
    return {f"{stream}/{one}": Position(offset).encode() for one, offset in offsets.items()}


def cut_seen(judge: Judge, group: str) -> dict[int, int]:
    """Return where Java sees a group."""
    (line,) = [one for one in judge("look", group) if one.startswith("cut ")]
    pairs = [one.split("=") for one in line.removeprefix("cut {").removesuffix("}").split(", ")]
    return {int(segment): int(offset) for segment, offset in pairs}


def events_of(lines: list[str]) -> list[str]:
    return [one.removeprefix("event ") for one in lines if one.startswith("event ")]


def checkpointed(lines: list[str]) -> list[str]:
    """Return the events in front of the last checkpoint."""
    return events_of(lines[: len(lines) - lines[::-1].index("checkpoint")])


# -- beginning where a group is


def test_reading_begins_where_the_readers_of_a_group_were_closed(pravega: PravegaServer, judge: Judge) -> None:
    """PV14."""
    stream, name = filled(pravega, 2), group_name()
    judge("create", name, stream)
    read = events_of(judge("read", name, "r", "11", "close"))
    rest = read_all(source_of(pravega, stream, start=f"group:{name}", end="latest"))
    assert len(read) == 11
    assert sorted(read + rest) == [f"{number:02}" for number in range(30)]


def test_a_group_with_readers_is_refused_but_its_last_checkpoint_is_not(pravega: PravegaServer, judge: Judge) -> None:
    """PV14."""
    stream, name = filled(pravega), group_name()
    judge("create", name, stream)
    with pytest.raises(UsageError, match=f"'{name}' of scope '{SCOPE}' has no checkpoint yet"):
        source_of(pravega, stream, start=f"checkpoint:{name}").begin()
    before = checkpointed(judge("read", name, "r", "5", "checkpoint"))
    with pytest.raises(UsageError, match=rf"still has readers \(r\), and reads on; close them.*checkpoint:{name}"):
        source_of(pravega, stream, start=f"group:{name}").begin()
    source = source_of(pravega, stream, start=f"checkpoint:{name}", end="latest")
    assert source.begin() == {0: len(before) * EVENT}
    assert read_all(source) == [f"{number:02}" for number in range(30)][len(before) :]


def test_a_checkpoint_with_ends_of_segments_is_begun_at(pravega: PravegaServer, judge: Judge) -> None:
    """PV14: segments were split and merged meanwhile."""
    stream, name = pravega.create_stream(1), group_name()
    left, right = pravega.scale(stream, [0], [(0.0, 0.5), (0.5, 1.0)])
    events = [f"{number:02}" for number in range(20)]
    pravega.write(stream, events, events)
    pravega.scale(stream, [left, right], [(0.0, 1.0)])
    pravega.write(stream, ["zz"], ["z"])
    judge("create", name, stream)
    for reader, count in (("q", "4"), ("r", "16")):
        done = checkpointed(judge("read", name, reader, count, "checkpoint"))
        rest = read_all(source_of(pravega, stream, start=f"checkpoint:{name}", end="latest"))
        assert sorted(done + rest) == [*events, "zz"]
        judge("create", name := group_name(), stream)


def test_groups_that_say_nothing_of_the_stream_are_refused_when_it_matters(
    pravega: PravegaServer, judge: Judge
) -> None:
    """PV14: a restored position does not need them."""
    stream, name = filled(pravega), group_name()
    missing = source_of(pravega, stream, start=f"group:{name}", end="latest")
    assert read_all(missing, at(stream, {0: 28 * EVENT})) == ["28", "29"]
    with pytest.raises(UsageError, match=f"has no reader group '{name}'.*with positions"):
        read_all(missing)
    judge("create", name, filled(pravega))
    with pytest.raises(UsageError, match=f"has no position in stream '{stream}'"):
        read_all(source_of(pravega, stream, start=f"group:{name}", end="latest"))
    for wrong in ("group:", "group:a b", "billing:x", "group"):
        with pytest.raises(UsageError, match="nor a reader group such as 'group:billing'"):
            Pravega(pravega.address, stream, format="text", start=wrong)
    with pytest.raises(UsageError, match="neither 'latest' nor a stream cut"):
        Pravega(pravega.address, stream, format="text", end="group:billing")


# -- a group that follows


def test_java_sees_the_newest_checkpoint_and_reads_on_from_there(pravega: PravegaServer, judge: Judge) -> None:
    """PV15."""
    stream, name = filled(pravega), group_name()
    source = source_of(pravega, stream, group=name)
    assert source.publishes
    source.publish(HOLDER, None, {}, begins=True)
    assert cut_seen(judge, name) == {0: 0}
    for _ in range(2):
        source.publish(HOLDER, CheckpointId(4), at(stream, {0: 26 * EVENT}), begins=False)
    looked = judge("look", name)
    assert looked == [f"cut {{0={26 * EVENT}}}", "readers []", f"unread {4 * EVENT}"]
    assert events_of(judge("read", name, "r", "3", "close")) == ["26", "27", "28"]
    assert cut_seen(judge, name) == {0: 29 * EVENT}
    assert read_all(source_of(pravega, stream, start=f"group:{name}", end="latest")) == ["29"]
    over = source_of(pravega, stream, start=f"group:{name}", group=name)
    over.publish(replace(HOLDER, life="another"), None, {}, begins=True)
    assert cut_seen(judge, name) == {0: 29 * EVENT}, "started over where Java has read to"
    source.publish(HOLDER, CheckpointId(4), at(stream, {0: 26 * EVENT}), begins=True)
    assert events_of(judge("read", name, "r", "1", "close")) == ["26"]
    judge("reset", name)
    assert cut_seen(judge, name) == {0: 26 * EVENT}
    source.publish(HOLDER, CheckpointId(5), at(stream, {0: 27 * EVENT}), begins=False)
    assert cut_seen(judge, name) == {0: 27 * EVENT}


def test_a_replaced_generation_does_not_move_the_group(pravega: PravegaServer, judge: Judge) -> None:
    """PV16."""
    stream, name = filled(pravega), group_name()
    source, second = source_of(pravega, stream, group=name), replace(HOLDER, generation=Generation(2))
    source.publish(second, CheckpointId(7), at(stream, {0: 6 * EVENT}), begins=True)
    for begins in (True, False):
        with pytest.raises(FencedError, match="generation 1 was replaced by generation 2"):
            source.publish(HOLDER, CheckpointId(9), at(stream, {0: 9 * EVENT}), begins=begins)
    source.publish(second, CheckpointId(6), at(stream, {0: 3 * EVENT}), begins=False)
    assert cut_seen(judge, name) == {0: 6 * EVENT}, "a call that comes late"
    source.publish(replace(second, generation=Generation(3)), CheckpointId(6), at(stream, {0: 3 * EVENT}), begins=True)
    assert cut_seen(judge, name) == {0: 3 * EVENT}, "an older checkpoint that was restored"
    another = replace(HOLDER, life="another")
    with pytest.raises(UsageError, match="was taken over by another pipeline of the same name"):
        source.publish(another, CheckpointId(1), at(stream, {0: EVENT}), begins=False)
    source.publish(another, None, {}, begins=True)
    assert cut_seen(judge, name) == {0: 0}, "a pipeline that starts over"


def test_the_log_of_a_group_stays_short_and_readable(
    pravega: PravegaServer, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PV15."""
    monkeypatch.setattr(reader_group, "LOG_BYTES_MAX", 4_000)
    stream, name = filled(pravega), group_name()
    source = source_of(pravega, stream, group=name)
    for number in range(60):
        source.publish(HOLDER, CheckpointId(number), at(stream, {0: number % 30 * EVENT}), begins=False)
        if number == 40:
            assert cut_seen(judge, name) == {0: 10 * EVENT}
    assert cut_seen(judge, name) == {0: 29 * EVENT}
    log = SegmentLog(pravega.client, StreamName(SCOPE, f"_RG{name}"), SYSTEM_ENVIRONMENT)
    log.news()
    assert log.begin > 0
    assert log.read_to - log.begin < 10_000
    log.close()
    assert events_of(judge("read", name, "r", "1", "close")) == ["29"]


def test_a_group_that_is_shared_with_readers_of_java_is_refused(
    pravega: PravegaServer, judge: Judge, tmp_path: Path
) -> None:
    """PV17."""
    stream, name = filled(pravega), group_name()

    def pipeline(found: testing.Collect) -> hg.Pipeline:
        checkpointing = hg.Checkpointing(interval="50ms", dir=tmp_path / "checkpoints")
        made = hg.Pipeline("p", checkpointing=checkpointing)
        made.source(hg.Pravega(pravega.address, stream, format="text", group=name), name="in").sink(found, name="out")
        return made

    watching, found = Watching(), testing.Collect(tmp_path / "out")
    problem = rf"reader group '{name}' of stream '{stream}' has readers of Pravega's own client \(r\), and is read by"
    with testing.running(pipeline(found), observer=watching) as run:
        watching.wait_checkpoints(1)
        judge("read", name, "r", "0")
        pravega.write(stream, ["xx"])
        with pytest.raises(PipelineFailed, match=problem):
            run.wait(WAIT_S)
    with pytest.raises(PipelineFailed, match=problem):
        testing.run(pipeline(found), timeout_s=PATIENCE_S)


@pytest.mark.timeout(1_800)
def test_a_group_follows_a_pipeline_through_restarts_and_back_to_a_savepoint(
    pravega: PravegaServer, judge: Judge, tmp_path: Path
) -> None:
    """PV15, PV16: at other parallelisms, and from a savepoint."""
    stream, name = pravega.create_stream(2), group_name()
    pipeline_name, out = f"p-{uuid.uuid4().hex}", tmp_path / "out"

    def rounds(place: str, events: list[str], parallelism: int, **options: Any) -> int:
        """Write events; run until they are read; stop with a savepoint; return the last checkpoint."""
        pravega.write(stream, events, events)
        found, watching = testing.Collect(out / place), Watching()
        checkpointing = hg.Checkpointing(interval="50ms", dir=tmp_path / "checkpoints")
        pipeline = hg.Pipeline(pipeline_name, checkpointing=checkpointing)
        source = hg.Pravega(pravega.address, stream, format="text", group=name)
        pipeline.source(source, name="in").sink(found, name="out")
        with testing.running(pipeline, observer=watching, parallelism=parallelism, **options) as run:
            while not {row["value"] for row in found.rows()} >= set(events):
                watching.wait_checkpoints(1)
            run.stop(savepoint=tmp_path / f"savepoint-{events[0]}")
            assert run.wait(WAIT_S) is not None
        return watching.completed[-1]

    rounds("one", [f"{number:02}" for number in range(40)], 2)
    first = cut_seen(judge, name)
    assert sum(first.values()) == 40 * EVENT
    last = rounds("one", [f"{number:02}" for number in range(40, 60)], 1)
    assert sum(cut_seen(judge, name).values()) == 60 * EVENT
    back: dict[str, Any] = {"restore": tmp_path / "savepoint-00", "go_back_past": last}
    rounds("two", [f"{number:02}" for number in range(60, 70)], 2, **back)
    assert sum(cut_seen(judge, name).values()) == 70 * EVENT

    begun: dict[int, dict[int, int]] = {}
    log = SegmentLog(pravega.client, StreamName(SCOPE, f"_RG{name}"), SYSTEM_ENVIRONMENT)
    for record in log.news():
        mark, state = newest_mark([record]), state_after([record])
        assert mark is not None
        assert state is not None
        begun.setdefault(mark.generation, numbers_in(StreamName.parse(stream), state.unassigned))
    log.close()
    assert [sum(cut.values()) for cut in begun.values()] == [0, 40 * EVENT, 40 * EVENT]
    assert list(begun.values())[1:] == [first, first], "each generation begins with what it restored"
