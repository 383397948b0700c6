from __future__ import annotations

import errno
import glob
import os
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark import cloudpickle
from tests.connectors.source_reading import context, read_all, read_over_subtasks

from headgate.connectors.base import SplitPosition
from headgate.connectors.files import line_file as lines_module
from headgate.connectors.files.file_position import FilePosition
from headgate.connectors.files.file_sink import FileSink
from headgate.connectors.files.filesystem import LocalFiles
from headgate.connectors.files.line_file import FileOptions, LineFile
from headgate.connectors.files.line_source import CsvFiles, FileReader, JsonLines, TextFiles
from headgate.connectors.files.lines import Lines
from headgate.connectors.files.selection import owner_of_file
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.testing.source_kit import check_source

SCHEMA = {"level": pa.string(), "count": pa.int64(), "at": pa.timestamp("ms")}


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", 7)
    monkeypatch.setattr(lines_module, "ROWS_MAX", 3)


def texts(rows: list[dict[str, object]]) -> list[object]:
    return [row["line"] for row in rows]


def test_lines_of_files_globs_and_directories_are_read(tmp_path: Path) -> None:
    write(tmp_path / "one.log", b"a\nb\n")
    write(tmp_path / "dir" / "deep" / "two.log", b"c\r\nd")
    write(tmp_path / "dir" / "_staging" / "hidden.log", b"x\n")
    write(tmp_path / "dir" / ".swp", b"x\n")
    write(tmp_path / "g1.txt", b"\n")
    source = TextFiles([tmp_path / "one.log", tmp_path / "dir", str(tmp_path / "g*.txt")])
    assert source.schema() == pa.schema([("line", pa.large_string())])
    assert sorted(texts(read_over_subtasks(source, 1))) == ["", "a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("given", "files", "read"),
    [
        ("[x].log", ["[x].log"], "[x].log"),
        ("[prod]/*.log", ["[prod]/a.log"], "[prod]/a.log"),
        ("[prod]/[a].log", ["[prod]/[a].log"], "[prod]/[a].log"),
        ("a*b.log", ["a*b.log"], "a*b.log"),
        ("a[*]b.log", ["a*b.log", "aXb.log"], "a*b.log"),
        ("[x].log", ["x.log"], "x.log"),
        ("[prod]", ["[prod]/a.log"], "[prod]/a.log"),
    ],
)
def test_what_exists_by_its_name_is_no_pattern(given: str, files: list[str], read: str, tmp_path: Path) -> None:
    for name in files:
        write(tmp_path / name, f"{name}\n".encode())
    for follow in (False, True):
        source = TextFiles(str(tmp_path / given), follow=follow)
        source.schema()
        reader = source.open(context())
        batch = reader.poll()
        assert batch is not None
        assert texts(batch.batch.to_pylist()) == [read]
        assert list(reader.splits()) == [str(tmp_path / read)]


@pytest.mark.parametrize(
    ("given", "files"),
    [
        ("[x].log", ["[x].log", "x.log"]),
        ("[prod]/*.log", ["[prod]/a.log", "p/a.log"]),
        ("a*b.log", ["a*b.log", "aXb.log"]),
    ],
)
def test_what_may_be_a_name_and_a_pattern_is_refused(given: str, files: list[str], tmp_path: Path) -> None:
    for name in files:
        write(tmp_path / name, b"a\n")
    with pytest.raises(UsageError, match=r"may mean .*, which exists, or a pattern that also fits"):
        TextFiles(str(tmp_path / given))
    assert texts(read_over_subtasks(TextFiles(glob.escape(str(tmp_path / files[0]))), 1)) == ["a"]


def test_a_rotated_file_with_a_name_like_a_pattern_is_awaited(tmp_path: Path) -> None:
    write(tmp_path / "[x].log.1", b"a\n")
    write(tmp_path / "y.log", b"no\n")
    source = TextFiles(str(tmp_path / "[x].log"), follow=True)
    source.schema()
    reader = source.open(context())
    assert reader.poll() is None
    write(tmp_path / "[x].log", b"b\n")
    assert texts(read_over_subtasks(TextFiles(str(tmp_path / "[x].log")), 1)) == ["b"]


@pytest.mark.parametrize("url", ["file://{}/a%20b.log", "file:{}/a%20b.log", "file://localhost{}/a%20b.log"])
def test_a_file_url_is_its_path(url: str, tmp_path: Path) -> None:
    write(tmp_path / "a b.log", b"a\n")
    assert texts(read_over_subtasks(TextFiles(url.format(tmp_path)), 1)) == ["a"]
    assert FileSink(f"file:{tmp_path}/out").url == f"file://{tmp_path}/out"


def test_a_url_of_another_scheme_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"files cannot be read from ftp://host; give a local path, or a URL of hdfs://"
    ):
        TextFiles("ftp://host/a.log")


@pytest.mark.parametrize("pattern", ["", "/tmp/*.log", "../*.log", ".hidden/*", "_staging/*.log", "a/**/.x*"])
def test_a_pattern_that_fits_no_file_is_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pattern="):
        TextFiles(tmp_path, pattern=pattern, follow=True)


def test_a_pattern_below_a_directory_that_is_missing_is_refused(tmp_path: Path) -> None:
    source = TextFiles(f"{tmp_path}/nowhere/*.log", follow=True)
    with pytest.raises(UsageError, match=r"is a pattern below the directory .*/nowhere, which does not exist"):
        source.schema()


@pytest.mark.parametrize("parallelism", [1, 2, 5])
def test_every_line_is_read_by_one_subtask(tmp_path: Path, parallelism: int) -> None:
    for number in range(7):
        write(tmp_path / f"{number}.log", f"{number}\n".encode())
    assert sorted(texts(read_over_subtasks(TextFiles(tmp_path), parallelism))) == list("0123456")


@pytest.mark.long
@pytest.mark.usefixtures("small_blocks")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    data=st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"a", b"bcdefghij", "é".encode(), b""]), max_size=40),
    stop_after=st.integers(0, 30),
    line_end=st.booleans(),
)
def test_any_block_boundary_and_any_restart_give_the_same_lines(
    tmp_path: Path, data: list[bytes], stop_after: int, line_end: bool
) -> None:
    content = b"".join(data) + (b"\n" if line_end else b"")
    path = write(tmp_path / "x.log", content)
    expected = [line.removesuffix(b"\r").decode() for line in content.split(b"\n")]
    if not content.split(b"\n")[-1]:
        expected.pop()
    source = TextFiles(path, include_path=True)
    source.schema()
    first = source.open(context())
    rows: list[dict[str, object]] = []
    for _ in range(stop_after):
        batch = first.poll()
        rows += [] if batch is None else batch.batch.to_pylist()
    second = source.open(context(positions=first.positions()))
    rows += read_all(second)[0]
    assert texts(rows) == expected
    for row in rows:
        start = row["byte"]
        assert isinstance(start, int)
        assert content[start:].split(b"\n")[0].removesuffix(b"\r").decode() == row["line"]


def test_a_followed_file_delivers_a_line_only_when_it_is_complete(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", b"one\ntw")
    source = TextFiles(tmp_path, follow=True, poll_interval="1ms", discovery_interval=0)
    seconds = [0.0]
    reader = followed(source, seconds)
    assert poll_some(reader, seconds) == ["one"]
    with path.open("ab") as file:
        file.write(b"o\nthree")
    assert poll_some(reader, seconds) == ["two"]
    write(tmp_path / "b.log", b"new\n")
    assert poll_some(reader, seconds) == ["new"]
    assert not reader.is_finished()
    assert len(reader.splits()) == 2
    with path.open("ab") as file:
        file.write(b"!\n")
    again = followed(source, seconds, reader.positions())
    assert poll_some(again, seconds) == ["three!"]


def followed(source: TextFiles, seconds: list[float], positions: dict[str, bytes] | None = None) -> FileReader:
    source.schema()
    reader = source.open(context(positions=positions, clock_ms=lambda: int(seconds[0] * 1_000)))
    assert isinstance(reader, FileReader)
    return reader


def poll_some(reader: FileReader, seconds: list[float]) -> list[object]:
    found: list[object] = []
    for _ in range(8):
        seconds[0] += 1.0
        batch = reader.poll()
        found += [] if batch is None else texts(batch.batch.to_pylist())
    return found


def test_followed_files_are_looked_at_as_the_clock_of_the_worker_says(tmp_path: Path) -> None:
    path, now_ms = write(tmp_path / "a.log", b"one\n"), [5]
    source = TextFiles(tmp_path, follow=True, poll_interval="20ms", discovery_interval="1s")
    source.schema()
    reader = source.open(context(clock_ms=lambda: now_ms[0]))

    def found_at(time_ms: int) -> list[object]:
        now_ms[0] = time_ms
        batches = [reader.poll() for _ in range(4)]
        return [text for batch in batches if batch is not None for text in texts(batch.batch.to_pylist())]

    assert found_at(5) == ["one"]
    with path.open("ab") as file:
        file.write(b"two\n")
    write(tmp_path / "b.log", b"new\n")
    assert found_at(24) == []
    assert found_at(25) == ["two"]
    assert found_at(1_004) == []
    assert found_at(1_005) == ["new"]


def test_files_of_a_growing_directory_are_owned_by_the_frozen_hash_of_their_relative_path(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / "sub" / f"{number}.log", b"x\n")
    source = TextFiles(tmp_path, follow=True)
    source.schema()
    owned = [set(source.open(context(index, 3)).splits()) for index in range(3)]
    assert sum(len(files) for files in owned) == 20
    assert len(set().union(*owned)) == 20
    assert [owner_of_file(f"sub/{n}.log", 3) for n in range(6)] == OWNERS
    for number, owner in enumerate(OWNERS):
        assert str(tmp_path / "sub" / f"{number}.log") in owned[owner]


OWNERS = [0, 1, 2, 0, 0, 0]


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", b"one\ntwo\n")
    source = TextFiles(path, follow=True, poll_interval="1ms")
    seconds = [0.0]
    reader = followed(source, seconds)
    assert poll_some(reader, seconds) == ["one", "two"]
    before = reader.positions()
    os.truncate(path, 4)
    with pytest.raises(UsageError, match=r"a\.log has 4 bytes but was read to byte 8"):
        poll_some(reader, seconds)
    again = source.open(context(positions=before))
    with pytest.raises(UsageError, match="was truncated or replaced"):
        again.poll()


def test_a_file_removed_after_it_was_read_is_finished_and_one_removed_before_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", b"one\n")
    keep = write(tmp_path / "b.log", b"x\n")
    seconds = [0.0]
    source = TextFiles([tmp_path], follow=True, poll_interval="1ms")
    reader = followed(source, seconds)
    begin = reader.positions()
    poll_some(reader, seconds)
    after = reader.positions()
    path.unlink()
    poll_some(reader, seconds)
    assert list(reader.splits()) == [str(keep)]
    again = followed(source, seconds, after)
    assert poll_some(again, seconds) == []
    partly = FilePosition.decode(str(path), begin[str(path)])
    partly = FilePosition(partly.offset, seen_bytes=4)
    with pytest.raises(UsageError, match="was removed or replaced when 0 of its 4 bytes were read"):
        followed(source, seconds, {str(path): partly.encode()})


def test_invalid_utf8_is_a_bad_record_and_its_neighbours_flow(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", b"one\n\xff\xfe\ntwo\n\xc3\n\xa9\nthree")
    rows, bad = read_all(TextFiles(path).open(context()))
    assert texts(rows) == ["one", "two", "three"]
    assert [record["position"] for record in bad] == [
        f"{path} line {line} (byte {n})" for line, n in ((2, 4), (4, 11), (5, 13))
    ]
    assert bad[0] == {
        "node": "source",
        "problem": "invalid UTF-8",
        "position": f"{path} line 2 (byte 4)",
        "record": "\\xff\\xfe",
    }


WORDS = {"latin-1": "é", "cp1252": "€", "shift_jis": "ソ表", "gb18030": "한日é"}


@pytest.mark.parametrize("encoding", WORDS)
def test_text_in_other_encodings_is_read(tmp_path: Path, encoding: str) -> None:
    lines = [f'{number} {WORDS[encoding]}|\\"' for number in range(9)]
    path = write(tmp_path / "a.txt", "\r\n".join(lines).encode(encoding))
    rows, bad = read_all(TextFiles(path, encoding=encoding).open(context()))
    assert (texts(rows), bad) == (lines, [])


@pytest.mark.parametrize("encoding", WORDS)
def test_fields_and_headers_in_other_encodings_are_read(tmp_path: Path, encoding: str) -> None:
    word = WORDS[encoding]
    schema = {"n": pa.int64(), word: pa.string()}
    path = write(tmp_path / "a.csv", f'n;{word}\n1;"{word};\n{word}"\n2;\n'.encode(encoding))
    rows, bad = read_all(CsvFiles(path, schema, delimiter=";", encoding=encoding).open(context()))
    assert (rows, bad) == ([{"n": 1, word: f"{word};\n{word}"}, {"n": 2, word: None}], [])
    path = write(tmp_path / "a.json", f'{{"{word}": "{word}", "n": 1}}\n'.encode(encoding))
    assert read_all(JsonLines(path, schema, encoding=encoding).open(context()))[0] == [{"n": 1, word: word}]


def test_a_line_that_is_not_in_the_encoding_is_a_bad_record(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", b"one\n\x81\xe9\n\xe9\n")
    rows, bad = read_all(TextFiles(path, encoding="cp1252").open(context()))
    assert texts(rows) == ["one", "é"]
    assert [(one["problem"], one["position"]) for one in bad] == [("invalid cp1252", f"{path} line 2 (byte 4)")]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("tail", [b"\nlast\n", b""])
def test_an_oversize_line_is_a_bad_record_and_is_not_held_in_memory(tmp_path: Path, tail: bytes) -> None:
    path = write(tmp_path / "a.log", b"first\n" + b"x" * 100 + tail)
    source = TextFiles(path, line_bytes_max=20)
    source.schema()
    reader = source.open(context())
    rows, bad = [], []
    while not reader.is_finished():
        batch = reader.poll()
        if batch is not None:
            rows += batch.batch.to_pylist()
            bad += batch.bad.to_pylist() if batch.bad is not None else []
        reader = source.open(context(positions=reader.positions())) if batch is not None else reader
    assert texts(rows) == ["first", "last"][: 2 if tail else 1]
    assert [(b["problem"], b["position"]) for b in bad] == [
        ("the line has 100 bytes, more than 20", f"{path} line 2 (byte 6)")
    ]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 20])
def test_how_long_a_line_may_be_does_not_depend_on_blocks_and_offsets(
    block_bytes: int, restarts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", block_bytes)
    content = [b"x" * size for size in (0, 19, 20, 21, 3, 150, 20, 21, 22, 20, 0, 40)]
    path = write(tmp_path / "a.log", b"\n".join(content))
    source = TextFiles(path, line_bytes_max=20)
    source.schema()
    reader = source.open(context())
    rows: list[dict[str, object]] = []
    bad: list[dict[str, object]] = []
    while not reader.is_finished():
        batch = reader.poll()
        if batch is not None:
            rows += batch.batch.to_pylist()
            bad += batch.bad.to_pylist() if batch.bad is not None else []
            reader = source.open(context(positions=reader.positions())) if restarts else reader
    assert [len(str(text)) for text in texts(rows)] == [0, 19, 20, 3, 20, 20, 0]
    problems = [f"the line has {size} bytes, more than 20" for size in (21, 150, 21, 22, 40)]
    assert [(b["problem"], b["record"]) for b in bad] == [(problem, "x" * 20) for problem in problems]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("block_bytes", "rows_max"), [(1, 1), (7, 3), (64, 3), (1 << 20, 1 << 16)])
def test_a_bad_line_is_named_by_its_number_wherever_blocks_end_and_reading_began(
    block_bytes: int, rows_max: int, restarts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(lines_module, "ROWS_MAX", rows_max)
    content = [b"", b"{}", b"x\r", b"", b" ", b"y" * 30, b"{}", b"z", b"y" * 90, b"", b"{}", b"\xff", b"y" * 150, b"x"]
    path = write(tmp_path / "a.jsonl", b"\n".join(content))
    starts = [sum(len(line) + 1 for line in content[:index]) for index in range(len(content))]
    source = JsonLines(path, {"n": int}, line_bytes_max=20)
    source.schema()
    reader = source.open(context())
    places: list[str] = []
    while not reader.is_finished():
        batch = reader.poll()
        if batch is not None:
            places += [] if batch.bad is None else batch.bad["position"].to_pylist()
            reader = source.open(context(positions=reader.positions())) if restarts else reader
    bad = [index for index, line in enumerate(content) if line.strip() not in (b"", b"{}")]
    assert places == [f"{path} line {index + 1} (byte {starts[index]})" for index in bad]


def test_a_limit_of_lines_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line_bytes_max must be a number of bytes of at least 1, but is 0"):
        TextFiles(tmp_path, line_bytes_max=0)


def test_json_objects_become_typed_records(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf"
    data += b'{"level":"INFO","count":1,"at":"2026-01-02T03:04:05.006Z","other":[1]}\r\n\n  \n {"count":null} \n'
    source = JsonLines(write(tmp_path / "a.jsonl", data), SCHEMA)
    assert source.schema().field("at").type == pa.timestamp("us")
    rows, bad = read_all(source.open(context()))
    assert bad == []
    assert [row["count"] for row in rows] == [1, None]
    assert rows[0]["at"].isoformat() == "2026-01-02T03:04:05.006000"


BAD_LINES = [
    (b'{"count":"x"}', "field 'count' is int64, which cannot hold \"x\""),
    (b'{"count":1.5}', "field 'count' is int64, which cannot hold 1.5"),
    (b'{"count":99999999999999999999}', "field 'count' is int64, which cannot hold 99999999999999999999"),
    (b"null", "not a JSON object"),
    (b"[1]", "not a JSON object"),
    (b'{"level":', "not a JSON object"),
    (b'{"count":1}{"count":2}', "several JSON values on one line"),
    (b'{"level":"\\ud800"}', "field 'level' is large_string, which cannot hold \"\\ud800\""),
    (b'{"at":"99999-01-01"}', "field 'at' is timestamp[us], which cannot hold \"99999-01-01\""),
    (b'{"level":"\xff"}', "invalid UTF-8"),
    (b'{"count":1}\x00{}', "The document is empty"),
    (b'{"level":"x"}', "field 'count' is missing or null"),
    (b'{"count":null}', "field 'count' is missing or null"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES)
def test_a_bad_json_line_is_isolated_with_its_position(tmp_path: Path, line: bytes, problem: str) -> None:
    good = [b'{"count":%d}' % number for number in range(5)]
    path = write(tmp_path / "a.jsonl", b"\n".join([*good[:3], line, *good[3:], line]))
    source = JsonLines(path, SCHEMA, required=["count"], include_path=True)
    rows, bad = read_all(source.open(context()))
    assert [row["count"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["byte"] for row in rows] == [0, 12, 24, 36 + len(line) + 1, 48 + len(line) + 1]
    assert [record["problem"] for record in bad] == [problem, problem]
    assert bad[0]["position"] == f"{path} line 4 (byte 36)"


def test_deep_nesting_and_halves_of_objects_do_no_harm(tmp_path: Path) -> None:
    deep = b'{"count":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    path = write(tmp_path / "a.jsonl", b'{"count":\n1}{"count":2}\n{"count":3}\n' + deep + b"\n")
    rows, bad = read_all(JsonLines(path, SCHEMA).open(context()))
    assert [row["count"] for row in rows] == [3]
    assert len(bad) == 3


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.lists(st.one_of(st.integers(0, 9), st.sampled_from([line for line, _ in BAD_LINES])), max_size=30))
def test_good_lines_survive_any_mixture_with_bad_ones(tmp_path: Path, lines: list[int | bytes]) -> None:
    data = b"\n".join(line if isinstance(line, bytes) else b'{"count":%d}' % line for line in lines)
    rows, bad = read_all(JsonLines(write(tmp_path / "a.jsonl", data), SCHEMA, required=["count"]).open(context()))
    assert [row["count"] for row in rows] == [line for line in lines if isinstance(line, int)]
    assert len(bad) == sum(isinstance(line, bytes) for line in lines)


def test_nested_types_and_dates_are_cast_to_canonical_types(tmp_path: Path) -> None:
    schema = pa.schema([("day", pa.date32()), ("tags", pa.list_(pa.string())), ("in", pa.struct([("x", pa.int8())]))])
    data = b'{"day":"2026-01-02","tags":["a","b"],"in":{"x":1}}\n{"day":"nonsense"}\n'
    rows, bad = read_all(JsonLines(write(tmp_path / "a", data), schema).open(context()))
    assert [(str(row["day"]), row["tags"], row["in"]) for row in rows] == [("2026-01-02", ["a", "b"], {"x": 1})]
    assert len(bad) == 1


def test_wrong_use_is_refused_in_the_driver(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.log does not exist"):
        TextFiles(tmp_path / "nothing.log").schema()
    with pytest.raises(UsageError, match="there is no file at"):
        TextFiles(tmp_path / "*.log").schema()
    with pytest.raises(UsageError, match="is compressed in a way"):
        TextFiles(write(tmp_path / "a.xz", b"")).schema()
    with pytest.raises(UsageError, match="no input path was given"):
        TextFiles([])
    for encoding in ("utf-16", "utf-7", "cp037", "iso2022_jp", "nonsense", 7):
        with pytest.raises(UsageError, match=f"encoding {encoding!r} is not supported"):
            TextFiles(tmp_path, encoding=encoding)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="which JSON cannot express"):
        JsonLines(write(tmp_path / "d", b""), {"d": pa.duration("s")}).schema()
    with pytest.raises(UsageError, match="required field 'b' is not in the schema"):
        JsonLines(write(tmp_path / "a.log", b""), {"a": pa.int64()}, required=["b"]).schema()
    with pytest.raises(UsageError, match="include_path adds a column 'path'"):
        TextFiles(tmp_path / "a.log", line_column="path", include_path=True).schema()


def test_a_damaged_position_is_refused() -> None:
    assert FilePosition.decode("x", FilePosition(5, 9, 3, 2**64 - 1, True).encode()) == FilePosition(
        5, 9, 3, 2**64 - 1, True
    )
    with pytest.raises(CorruptionError, match="position of x is damaged"):
        FilePosition.decode("x", b"\x09" * 28)


def test_sources_are_configuration_that_travels(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"count":1}\n')
    source = JsonLines(path, SCHEMA)
    source.schema()
    copy = cloudpickle.loads(cloudpickle.dumps(source))
    assert read_all(copy.open(context()))[0] == [{"level": None, "count": 1, "at": None}]


def test_the_list_of_files_is_the_drivers(tmp_path: Path) -> None:
    write(tmp_path / "b.log", b"b\n")
    source = TextFiles(tmp_path)
    source.schema()
    write(tmp_path / "a.log", b"late\n")
    assert texts(read_all(source.open(context()))[0]) == ["b"]


def test_a_file_that_ends_without_line_end_is_finished_at_its_last_byte(tmp_path: Path) -> None:
    file = LineFile(str(write(tmp_path / "a", b"x\ny")), FilePosition())
    while not file.is_finished:
        file.step()
    assert file.position().offset == 3
    assert file.position().is_finished


@pytest.mark.long
class ShortReads(LocalFiles):
    """A file system that returns at most three bytes at a time."""

    def pread_into(self, descriptor: int, space: memoryview, offset: int) -> int:
        return super().pread_into(descriptor, space[:3], offset)


@pytest.mark.parametrize("system", [LocalFiles(), ShortReads()])
def test_lines_stay_what_they_are_while_the_file_is_read_on(
    system: LocalFiles, tmp_path: Path, small_blocks: None
) -> None:
    expected = [b"x" * (number % 17) + b"%d" % number for number in range(200)]
    path = write(tmp_path / "a", b"\n".join(expected[:150]))
    file = LineFile(str(path), FilePosition(), FileOptions(follow=True), system)
    held = []
    while sum(len(lines.starts) for lines in held) < len(expected):
        if isinstance(lines := file.step(), Lines):
            held.append(lines)
        if file.is_at_end:
            with path.open("ab") as more:
                more.write(b"\n" + b"\n".join(expected[150:]) + b"\n")
    assert [value for lines in held for value in lines.values.to_pylist()] == expected


def test_files_pass_the_conformance_kit(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path / f"{number}.log", "".join(f"{number}-{line}\n" for line in range(number)).encode())
    assert len(check_source(TextFiles(tmp_path, include_path=True))) == 6


@pytest.mark.parametrize("follow", [False, True])
def test_what_this_user_may_not_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follow: bool
) -> None:
    path = write(tmp_path / "logs" / "a.log", b"x\n")
    for forbidden, problem in ((path, "a.log cannot be read"), (tmp_path / "logs", "logs cannot be listed")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda asked, mode, refused=str(forbidden): str(asked) != refused)
            with pytest.raises(UsageError, match=f"{problem}; allow this user to read it"):
                TextFiles(tmp_path / "logs", follow=follow).schema()


def test_a_disk_that_fails_while_a_file_is_read_is_a_storage_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TextFiles(write(tmp_path / "a.log", b"one\ntwo\n"))
    source.schema()
    reader = source.open(context())
    before = reader.positions()

    def fails(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fails)
        with pytest.raises(StorageError, match=r"a\.log.*Input/output error") as caught:
            reader.poll()
    assert caught.value.is_transient
    again = source.open(context(positions=before))
    assert texts(read_all(again)[0]) == ["one", "two"]


def test_progress_is_the_bytes_read_of_the_size_that_was_met(tmp_path: Path) -> None:
    path, seconds = str(write(tmp_path / "a.log", b"one\ntwo\nthr")), [0.0]
    reader = followed(TextFiles(tmp_path / "a.log", follow=True), seconds)
    assert reader.progress() == {path: SplitPosition(0, None, "bytes")}, "it was not opened yet"
    assert poll_some(reader, seconds) == ["one", "two"]
    assert reader.progress() == {path: SplitPosition(8, 11, "bytes")}, "a line without end waits"
    write(tmp_path / "a.log", b"one\ntwo\nthree\n")
    assert poll_some(reader, seconds) == ["three"]
    assert reader.progress() == {path: SplitPosition(14, 14, "bytes")}


def test_a_file_that_was_read_to_its_end_is_not_in_the_progress(tmp_path: Path) -> None:
    write(tmp_path / "a.log", b"one\n")
    reader = TextFiles(tmp_path / "a.log").open(context())
    while not reader.is_finished():
        reader.poll()
    assert reader.progress() == {}
