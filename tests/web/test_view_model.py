"""The logs that a page shows: only those of its pipeline, in whole lines, whatever is rotated meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.web.shop import NOW_MS, definition, progress

from headgate.model.ids import CheckpointId
from headgate.model.progress import SubtaskAlignment
from headgate.web import view_model
from headgate.web.view_model import (
    CHECKPOINTS_MAX,
    LEFT_OUT,
    NOTES_MAX,
    RATES_MAX,
    RESTARTS_MAX,
    SUBTASKS_MAX,
    LogDirectory,
    LogReader,
    RunView,
)


def test_the_graph_has_every_operator_and_every_way(tmp_path: Path) -> None:
    graph = RunView(definition(tmp_path)).to_json()["graph"]
    names = {node["name"]: node["role"] for node in graph["nodes"]}
    assert names["orders"] == "source"
    assert names["out"] == "sink"
    assert names["tries"] == "loop-head"
    edges = {(edge["from"], edge["to"]): edge for edge in graph["edges"]}
    assert all({edge["from"], edge["to"]} <= set(names) for edge in graph["edges"])
    assert edges["latest", "out"]["how"] == "chained"
    assert edges["key-by", "latest"]["how"] == "by shop"
    assert [edge["to"] for edge in graph["edges"] if edge["is_feedback"]] == ["tries"]
    assert len(edges) == len(graph["edges"])


def test_everything_shown_is_json(tmp_path: Path) -> None:
    story = RunView(definition(tmp_path))
    before = json.loads(json.dumps(story.to_json()))
    assert before["progress"] is None
    story.set_progress(progress(), NOW_MS, 0)
    story.add_checkpoint(7, 30, 2_048, NOW_MS)
    story.add_restart("worker 1 was lost", 100, NOW_MS)
    story.add_note("generation 2 continues from checkpoint 7", NOW_MS)
    story.set_end("finished", "finished after 3 s", NOW_MS)
    shown = json.loads(json.dumps(story.to_json()))
    assert shown["pipeline"] == "shop"
    assert shown["progress"]["state"] == "running"
    assert shown["progress"]["nodes"][0]["node"] == "orders"
    assert shown["rates"] == [[NOW_MS, 1_500.0, 1_200.0]]
    assert shown["checkpoints"][0]["checkpoint"] == 7
    assert shown["restarts"][0]["reason"] == "worker 1 was lost"
    assert shown["ended"]["outcome"] == "finished"
    assert dict(shown["settings"])["guarantee"] == "exactly once"
    assert story.version == 5


def test_a_story_is_bounded_whatever_happens(tmp_path: Path) -> None:
    story = RunView(definition(tmp_path))
    for number in range(2_000):
        story.set_progress(progress(), NOW_MS + number, 1_000 * number)
        story.add_checkpoint(number, 1, 1, NOW_MS)
        story.add_restart("again", 1, NOW_MS)
        story.add_note("again", NOW_MS)
    shown = story.to_json()
    assert len(shown["rates"]) == RATES_MAX
    assert len(shown["checkpoints"]) == CHECKPOINTS_MAX
    assert len(shown["restarts"]) == RESTARTS_MAX
    assert len(shown["notes"]) == NOTES_MAX
    assert shown["checkpoints"][-1]["checkpoint"] == 1_999


def test_curves_are_paced_by_a_clock_that_only_goes_forward(tmp_path: Path) -> None:
    story = RunView(definition(tmp_path))
    for uptime_ms, at_ms in ((0, NOW_MS), (400, NOW_MS + 3_600_000), (1_000, NOW_MS - 3_600_000), (1_500, NOW_MS)):
        story.set_progress(progress(), at_ms, uptime_ms)
    assert [at_ms for at_ms, *_ in story.to_json()["rates"]] == [NOW_MS, NOW_MS - 3_600_000]


def test_a_checkpoint_shows_who_waited_longest_for_its_barriers(tmp_path: Path) -> None:
    story = RunView(definition(tmp_path))
    story.add_checkpoint(7, 30, 2_048, NOW_MS)
    assert story.to_json()["checkpoints"][0]["longest"] is None
    assert story.alignment(7) is None
    subtasks = [SubtaskAlignment(f"w[{number}]", number, 1) for number in range(SUBTASKS_MAX + 3)]
    version = story.version
    story.set_alignments({CheckpointId(7): tuple(subtasks), CheckpointId(8): ()})
    assert story.version > version
    last = SUBTASKS_MAX + 2
    assert story.to_json()["checkpoints"][0]["longest"] == {"subtask": f"w[{last}]", "aligned_us": last, "frozen_us": 1}
    found = story.alignment(7)
    assert found is not None
    assert len(found["subtasks"]) == SUBTASKS_MAX
    assert (found["subtasks"][0]["subtask"], found["left_out"]) == (f"w[{last}]", 3)
    version = story.version
    story.set_alignments({CheckpointId(7): tuple(subtasks), CheckpointId(8): ()})
    assert story.version == version, "nothing has changed"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "worker-0.log"


def add(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def test_a_shelf_has_the_logs_of_its_pipeline_and_nothing_else(tmp_path: Path) -> None:
    shelf = LogDirectory()
    assert (shelf.place, shelf.names()) == ("", [])
    shelf.set_directory(str(tmp_path / "nowhere"))
    assert shelf.names() == []
    for name in ("worker-10.log", "worker-2.log", "spark.log", "worker-2.log.1", "other.log", "worker-x.log", "notes"):
        (tmp_path / name).touch()
    shelf.set_directory(str(tmp_path))
    assert shelf.names() == ["worker-2", "worker-10", "spark"]
    assert shelf.reader("worker-2") is not None
    assert all(shelf.reader(name) is None for name in ("other", "worker-3", "../worker-2", "worker-2.log", ""))


def test_lines_are_read_once_and_whole(log: Path) -> None:
    reader = LogReader(log)
    assert reader.read() == ""
    add(log, "one\ntw")
    assert reader.read() == "one\n"
    assert reader.read() == ""
    add(log, "o\nthree\n")
    assert reader.read() == "two\nthree\n"


def test_of_a_long_log_the_end_is_shown_from_the_beginning_of_a_line(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_model, "FIRST_BYTES", 10)
    monkeypatch.setattr(view_model, "STEP_BYTES_MAX", 20)
    add(log, "0123456789\nfive\nsix\n")
    reader = LogReader(log)
    assert reader.read() == "five\nsix\n"
    add(log, "".join(f"line {number}\n" for number in range(9)))
    assert reader.read() == f"{LEFT_OUT}line 8\n"


def test_a_log_that_is_rotated_loses_no_line(log: Path) -> None:
    reader = LogReader(log)
    add(log, "one\n")
    assert reader.read() == "one\n"
    add(log, "two\n")
    log.rename(log.with_name("worker-0.log.1"))
    assert reader.read() == "", "between two files"
    add(log, "three\n")
    assert reader.read() == "two\nthree\n"
    log.write_text("")
    assert reader.read() == ""
    add(log, "four\n")
    assert reader.read() == "four\n", "somebody emptied it"


def test_what_is_not_utf_8_is_shown_all_the_same(log: Path) -> None:
    log.write_bytes(b"caf\xe9\n")
    assert LogReader(log).read() == "caf\ufffd\n"
