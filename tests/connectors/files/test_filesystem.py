from __future__ import annotations

import bz2
import gzip
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.connectors.source_reading import context, read_all

from headgate.connectors.base import SplitPosition
from headgate.connectors.files import filesystem, line_file
from headgate.connectors.files.line_source import CsvFiles, JsonLines, LineSource, TextFiles
from headgate.errors import UsageError
from headgate.testing.source_kit import check_source


def zstd(data: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(data)
    return out.getvalue().to_pybytes()


CODECS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstd, ".bz2": bz2.compress}
EACH = pytest.mark.parametrize("ending", CODECS)


def read(source: LineSource, positions: dict[str, bytes] | None = None) -> list[dict[str, Any]]:
    source.schema()
    rows, bad = read_all(source.open(context(positions=positions)))
    assert not bad
    return rows


def lines(count: int, first: int = 0) -> bytes:
    return b"".join(b"%d %s\n" % (n, b"x" * (n % 50)) for n in range(first, first + count))


@EACH
def test_compressed_files_of_every_format_are_read(ending: str, tmp_path: Path) -> None:
    compress = CODECS[ending]
    text = tmp_path / f"a.log{ending}"
    text.write_bytes(compress(b"a\nb\r\nc"))
    assert [row["line"] for row in read(TextFiles(text))] == ["a", "b", "c"]
    (tmp_path / f"a.jsonl{ending}").write_bytes(compress(b'{"a":1}\n{"a":2}\n'))
    assert read(JsonLines(tmp_path / f"a.jsonl{ending}", {"a": int})) == [{"a": 1}, {"a": 2}]
    (tmp_path / f"a.csv{ending}").write_bytes(compress(b'b,a\n"x\ny",1\n'))
    assert read(CsvFiles(tmp_path / f"a.csv{ending}", {"a": int, "b": str})) == [{"a": 1, "b": "x\ny"}]


@EACH
def test_members_follow_each_other(ending: str, tmp_path: Path) -> None:
    compress = CODECS[ending]
    path = tmp_path / f"a{ending}"
    path.write_bytes(compress(b"") + compress(lines(500)) + compress(b"") * 2 + compress(lines(500, 500)))
    assert [int(row["line"].split()[0]) for row in read(TextFiles(path))] == list(range(1000))


@EACH
@pytest.mark.parametrize("cut", [1, 5, 200])
def test_a_truncated_file_says_so_after_what_is_whole(ending: str, cut: int, tmp_path: Path) -> None:
    path = tmp_path / f"a{ending}"
    first = CODECS[ending](b"one\n")
    path.write_bytes((first + CODECS[ending](random.Random(1).randbytes(1000)))[:-cut])
    source = TextFiles(path)
    source.schema()
    reader = source.open(context())
    with pytest.raises(UsageError, match=r"is truncated: its .* goes on after its \d+ bytes"):
        read_all(reader)


@EACH
def test_what_is_not_compressed_so_says_so(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(b"no such thing, but a text\n")
    with pytest.raises(UsageError, match=r"is not .*, or damaged"):
        read(TextFiles(path))
    assert [row["line"] for row in read(TextFiles(path, compression="none"))] == ["no such thing, but a text"]
    other = tmp_path / "b.log"
    other.write_bytes(CODECS[ending](b"text\n"))
    codec: Any = filesystem.CODECS[ending]
    assert read(TextFiles(other, compression=codec)) == [{"line": "text"}]


@EACH
@pytest.mark.parametrize("seed", range(3))
def test_any_position_is_gone_on_from(ending: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_ = random.Random(seed)
    monkeypatch.setattr(line_file, "BLOCK_BYTES", random_.choice([100, 700, 3000]))
    monkeypatch.setattr(line_file, "ROWS_MAX", random_.choice([3, 50]))
    monkeypatch.setattr(filesystem, "_STEP_BYTES", random_.choice([100, 5000]))
    monkeypatch.setattr(filesystem, "_HEAD_BYTES", 2_000)
    path = tmp_path / f"a.csv{ending}"
    path.write_bytes(CODECS[ending](b"n,text\n" + b"".join(b'%d,"a\n%d"\n' % (n, n) for n in range(2000))))
    source = CsvFiles(path, {"n": int, "text": str})
    source.schema()
    found: list[int] = []
    positions: dict[str, bytes] | None = None
    while len(found) < 2000:
        reader = source.open(context(positions=positions))
        before = len(found)
        for _ in range(random_.randrange(100, 400)):
            batch = reader.poll()
            found += batch.batch["n"].to_pylist() if batch is not None else []
            if len(found) > before + 500:
                break
        positions = dict(reader.positions())
    assert found == list(range(2000))


@EACH
def test_a_file_may_grow_by_members_between_two_starts(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(CODECS[ending](lines(10)))
    source = TextFiles(path)
    source.schema()
    reader = source.open(context())
    assert len(read_all(reader)[0]) == 10
    positions = dict(reader.positions())
    assert read(source, positions) == []
    path.write_bytes(path.read_bytes() + CODECS[ending](lines(5, 10)))
    assert [int(row["line"].split()[0]) for row in read(source, positions)] == list(range(10, 15))
    path.write_bytes(CODECS[ending](lines(3)))
    with pytest.raises(UsageError, match="truncated or replaced"):
        read(source, positions)
    path.write_bytes(CODECS[ending](lines(900, 7)))
    with pytest.raises(UsageError, match="truncated or replaced"):
        read(source, positions)


def test_a_file_that_was_read_and_compressed_then_is_not_read_once_more(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(lines(10))
    source = TextFiles(tmp_path)
    source.schema()
    reader = source.open(context())
    read_all(reader)
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(lines(10)))
    path.unlink()
    with pytest.raises(UsageError, match="may be the same, compressed"):
        read(source, dict(reader.positions()))


def test_the_end_of_a_name_may_be_in_upper_case(tmp_path: Path) -> None:
    (tmp_path / "A.LOG.GZ").write_bytes(gzip.compress(lines(10)))
    (tmp_path / "b.log.Bz2").write_bytes(bz2.compress(lines(10)))
    assert len(read(TextFiles(tmp_path))) == 20


def test_compressed_files_are_not_followed(tmp_path: Path) -> None:
    for paths, options in [
        ("a.gz", {}),
        ("a.GZ", {}),
        (".", {"pattern": "*.zst"}),
        (".", {"compression": "bz2"}),
    ]:
        with pytest.raises(UsageError, match="compressed files cannot be followed"):
            TextFiles(tmp_path / paths, follow=True, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must be one of infer, none, gzip, zstd, bz2"):
        TextFiles(tmp_path, compression="lz4")  # type: ignore[arg-type]
    (tmp_path / "a.xz").write_bytes(b"")
    with pytest.raises(UsageError, match="decompress it first"):
        TextFiles(tmp_path).schema()


def test_progress_is_of_the_compressed_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(random.Random(1).randbytes(9_000_000).replace(b"\n", b"") + b"\n"))
    source = TextFiles(path)
    source.schema()
    reader = source.open(context())
    for _ in range(2):
        reader.poll()
    (found,) = reader.progress().values()
    size = path.stat().st_size
    assert isinstance(found, SplitPosition)
    assert 0 < found.position < size
    assert found.end == size


def test_the_conformance_kit(tmp_path: Path) -> None:
    for index, (ending, compress) in enumerate(CODECS.items()):
        (tmp_path / f"{index}{ending}").write_bytes(compress(lines(30, 30 * index)))
    check_source(TextFiles(tmp_path), parallelisms=(2,))
