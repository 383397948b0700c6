"""What positions and committables say as text."""

from __future__ import annotations

import json

import msgspec
import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors.files.file_position import FilePosition
from headgate.connectors.files.parquet import ParquetPosition
from headgate.connectors.files.publish_log import StagedFile, encode_files
from headgate.connectors.registry import committable_text, position_text, readable
from headgate.model.state_schema import StateIdentity


def told(identity: str, split: str, data: bytes) -> str | None:
    return position_text(StateIdentity(identity), split, data)


def test_positions_of_sources_are_told() -> None:
    lines = FilePosition(offset=120, seen_bytes=400)
    parquet = ParquetPosition(group=2, row=7)
    rows = hg.FromRows([{"n": 1}]).identity()
    generator = hg.Generator({"n": hg.RowNumber()}).identity()
    texts = [
        told("files of lines, version 1", "a.log", lines.encode()),
        told("parquet files, version 1", "a.parquet", parquet.encode()),
        told("stream a created 1 with 2 segments", "0", (7).to_bytes(8, "big")),
        told("stream a created 1 with 2 segments", "0", (7).to_bytes(8, "big") + (9).to_bytes(8, "big")),
        told(rows, "0", (7).to_bytes(8, "little")),
        told(generator, "0 of 1", (8).to_bytes(8, "little")),
    ]
    found = [json.loads(str(text)) for text in texts]
    assert (found[0]["offset"], found[0]["seen_bytes"]) == (120, 400)
    assert (found[1]["group"], found[1]["row"]) == (2, 7)
    assert found[2:] == [{"position": 7}, {"position": 7, "end": 9}, {"row": 7}, {"row": 8}]


@pytest.mark.parametrize(
    "identity", ["files of lines, version 1", "parquet files, version 1", "stream a", "rows, version 1"]
)
def test_a_position_of_another_format_is_left_as_it_is(identity: str) -> None:
    assert told(identity, "s", b"\xff\x00") is None
    assert told("a source of somebody", "s", b'{"at": 3}') == '{"at": 3}'


def test_prepared_output_is_told() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("n", pa.int64())])):
        pass
    files = committable_text(encode_files([StagedFile("part-1", 3, 40, "ab")]))
    assert json.loads(str(files))["files"][0]["name"] == "part-1"
    assert (
        committable_text(msgspec.msgpack.encode([1, "app/logs", "p/out/3/0/1", 12]))
        == '[1,"app/logs","p/out/3/0/1",12]'
    )
    assert committable_text(b"1\np/out/3/0/1") == "p/out/3/0/1"
    assert committable_text(b"2\np/out/3/0/1\n17") == "p/out/3/0/1"
    assert committable_text(b"1\np/out/3/0/1\n" + sink.getvalue().to_pybytes()) == "p/out/3/0/1"


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"line 7", "line 7"), (b'{\n "a": 1}', '{\n "a": 1}'), (b"", ""), (b"\x80\x04K\x01.", None), (b"\xc0", None)],
)
def test_what_is_no_text_stays_bytes(data: bytes, text: str | None) -> None:
    assert readable(data) == text
