"""Text of any kind crosses boundaries: as itself where it can, as escapes where not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.codec.messages import Decline, decode_from_worker, encode_message
from headgate.codec.snapshot import decode_positions, encode_positions
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.plain_text import encodable, printable
from headgate.protocol.checkpoints.coordinator_events import AbortReason, Declined
from headgate.store.location import store_root
from headgate.testing import Collect, run

SURROGATE = json.loads('"\\ud83d"')


def test_only_what_utf8_cannot_hold_becomes_an_escape() -> None:
    assert encodable(f"ü😀\x1b\0{SURROGATE}") == "ü😀\x1b\0\\ud83d"


def test_printable_text_has_nothing_that_acts_on_a_terminal() -> None:
    assert printable(f"ü😀\t\n\x1b[31m\0\r\x9b\u202e{SURROGATE}") == "ü😀\t\n\\x1b[31m\\x00\\x0d\\x9b\\u202e\\ud83d"


def test_texts_of_a_failure_are_printable() -> None:
    failure = Failure(FailureKind.LOST, f"a{SURROGATE}", "b\x1b")
    assert (failure.reason, failure.detail) == ("a\\ud83d", "b\\x1b")


def test_a_message_with_any_text_arrives() -> None:
    declined = Declined(Generation(1), SubtaskId(VertexId("v"), 0), CheckpointId(2), AbortReason.SNAPSHOT_FAILED)
    arrived = decode_from_worker(encode_message(Decline(declined, f"no {SURROGATE}")))
    assert arrived == Decline(declined, "no \\ud83d")


@pytest.mark.parametrize("split", ["a", "ü", SURROGATE, os.fsdecode(b"\xff"), f"\0{SURROGATE}"])
def test_positions_of_any_split_are_read_as_they_were_written(split: str) -> None:
    positions = {split: b"1", "other": b"2"}
    assert decode_positions(encode_positions(positions)) == positions


def _raises(row: dict[str, Any]) -> dict[str, Any]:
    raise ValueError(f"no {SURROGATE} \x1b[31m")


def test_an_exception_with_any_text_reaches_the_user(tmp_path: Path) -> None:
    p = hg.Pipeline("fails", restart=hg.NoRestart())
    p.source(hg.FromRows([{"a": 1}])).map(_raises).sink(Collect(tmp_path / "out"))
    with pytest.raises(hg.PipelineFailed) as failed:
        run(p)
    assert "operator 'map'" in failed.value.reason
    assert failed.value.detail.endswith("ValueError: no \\ud83d \\x1b[31m")


def test_a_dead_letter_takes_an_exception_with_any_text(tmp_path: Path) -> None:
    letters = Collect(tmp_path / "bad")
    p = hg.Pipeline("diverts", bad_records=hg.DeadLetter(letters, exceptions=True))
    p.source(hg.FromRows([{"a": 1}])).map(_raises).sink(Collect(tmp_path / "out"))
    run(p)
    (row,) = letters.rows()
    assert "ValueError: no \\ud83d \\x1b[31m" in row["problem"]


def test_a_file_with_any_name_is_read_and_remembered(tmp_path: Path) -> None:
    directory, letters, sink = tmp_path / "in", Collect(tmp_path / "bad"), Collect(tmp_path / "out")
    directory.mkdir()
    name = os.path.join(os.fsencode(directory), b"a\xff\x1b[1m.jsonl")
    Path(os.fsdecode(name)).write_text('{"n": 1}\nx\n')
    for _ in range(2):
        p = hg.Pipeline("reads", bad_records=hg.DeadLetter(letters))
        p.source(hg.JsonLines(directory, {"n": int})).with_timestamps("n").sink(sink)
        run(p, checkpoint_dir=tmp_path / "checkpoints")
    assert sink.rows() == [{"n": 1}]
    assert [row["position"] for row in letters.rows()] == [f"{directory}/a\\udcff\\x1b[1m.jsonl line 2 (byte 9)"]


@pytest.mark.parametrize("name", ["a\0b", SURROGATE])
def test_a_directory_that_cannot_be_recorded_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(hg.UsageError, match="has a NUL or bytes that are not UTF-8"):
        hg.FileSink(f"{tmp_path}/{name}")
    with pytest.raises(hg.UsageError, match="has a NUL"):
        hg.JsonLines(f"{tmp_path}/a\0b", {"n": int})


def test_a_store_that_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    for name in ("a\0b", SURROGATE):
        with pytest.raises(hg.UsageError, match="has a NUL or bytes that are not UTF-8"):
            store_root(f"{tmp_path}/{name}")


def test_a_column_whose_name_is_not_unicode_is_refused() -> None:
    name = f"x{SURROGATE}"
    sentence = r"operator '.*': the name 'x\\ud83d' of a column has characters that are not Unicode"
    with pytest.raises(hg.UsageError, match=sentence):
        hg.Pipeline("p").source(hg.Generator({name: hg.RowNumber()}, rows=1))
    with pytest.raises(hg.UsageError, match=sentence):
        hg.Pipeline("p").source(hg.TextFiles(__file__, line_column=name))
