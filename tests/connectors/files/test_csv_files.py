from __future__ import annotations

import csv
import io
import random
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.conftest import few
from tests.connectors.source_reading import context, read_all

from headgate.connectors.encode import check_format, encode
from headgate.connectors.files import line_file
from headgate.connectors.files.line_source import CsvFiles
from headgate.errors import UsageError
from headgate.testing.source_kit import check_source

SCHEMA = {"a": pa.string(), "b": pa.int64()}


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def read(source: CsvFiles) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    source.schema()
    return read_all(source.open(context()))


def read_text(path: Path, text: str | bytes, schema: Any = None, **options: Any) -> list[dict[str, Any]]:
    rows, bad = read(CsvFiles(write(path / "a.csv", text), schema or SCHEMA, **options))
    assert not bad, bad
    return rows


def as_written(rows: list[tuple[object, ...]], names: tuple[str, ...] = ("a", "b"), **form: Any) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, **form).writerows([names, *rows] if names else rows)
    return out.getvalue()


def test_columns_are_found_by_the_header_of_each_file(tmp_path: Path) -> None:
    write(tmp_path / "1.csv", "b,a\n1,x\n")
    write(tmp_path / "2.csv", "extra,a,b\nq,y,2\n")
    write(tmp_path / "3.csv", "a\nz\n")
    write(tmp_path / "4.csv", "")
    write(tmp_path / "5.csv", "a,b")
    rows, bad = read(CsvFiles(tmp_path, SCHEMA))
    assert rows == [{"a": "x", "b": 1}, {"a": "y", "b": 2}, {"a": "z", "b": None}]
    assert bad == []


def test_a_file_without_a_usable_header_has_only_bad_records(tmp_path: Path) -> None:
    write(tmp_path / "1.csv", "x,1\ny,2\n")
    write(tmp_path / "2.csv", "a,b,a\ny,2,z\n")
    rows, bad = read(CsvFiles(tmp_path, SCHEMA))
    assert rows == []
    assert [(row["problem"], row["record"]) for row in bad] == [
        ("the header of the file has none of the columns a, b: x,1", "y,2"),
        ("the header of the file has two columns 'a'", "y,2,z"),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_quoted_line_ends_delimiters_and_quotes_are_text(end: str, mark: bytes, tmp_path: Path) -> None:
    rows = [(f"one{end}two", 1), ('say "no"', 2), ("x,y", 3), ("", 4), (f'"{end}', 5)]
    text = as_written(rows, lineterminator=end, quoting=csv.QUOTE_ALL)
    expected = [{"a": a, "b": b} for a, b in rows]
    assert read_text(tmp_path, mark + text.encode()) == expected
    without = as_written(rows, (), lineterminator=end, quoting=csv.QUOTE_ALL)
    assert read_text(tmp_path, mark + without.encode(), header=False) == expected


def test_every_type_is_read(tmp_path: Path) -> None:
    schema = {
        "s": pa.string(),
        "i": pa.int32(),
        "f": pa.float32(),
        "d": pa.decimal128(10, 2),
        "y": pa.bool_(),
        "day": pa.date32(),
        "local": pa.timestamp("us"),
        "at": pa.timestamp("us", "UTC"),
    }
    text = (
        "s,i,f,d,y,day,local,at\n"
        "x,-3,1.5,12.34,true,2026-01-02,2026-01-02 03:04:05.5,2026-01-02T03:04:05+01:00\n"
        '"",,,,,,,\n'
        ',"","","","","",2026-01-02T03:04:05,""\n'
        "z,1,2,3,0,2026-01-02,2026-01-02T03:04:05+02:00,2026-01-02T03:04:05Z\n"
    )
    first, second, third, fourth = read_text(tmp_path, text, schema)
    assert first["d"] == Decimal("12.34")
    assert first["y"] is True
    assert (first["i"], first["f"]) == (-3, 1.5)
    assert first["local"] == datetime(2026, 1, 2, 3, 4, 5, 500_000)
    assert first["at"] == datetime(2026, 1, 2, 2, 4, 5, tzinfo=UTC)
    assert second == {**dict.fromkeys(schema), "s": ""}
    assert third == {**dict.fromkeys(schema), "local": datetime(2026, 1, 2, 3, 4, 5)}
    assert fourth["local"] == datetime(2026, 1, 2, 1, 4, 5)


def test_nulls_are_what_was_said(tmp_path: Path) -> None:
    rows = read_text(tmp_path, 'a,b\nNA,NA\n"NA",1\n,2\n', null_values=["NA"])
    assert rows == [{"a": None, "b": None}, {"a": "NA", "b": 1}, {"a": "", "b": 2}]


def test_other_delimiters_formats_and_no_quotes(tmp_path: Path) -> None:
    schema = {"t": pa.timestamp("us"), "x": pa.float64()}
    text = "t;x\n31.12.2026 10:00;1,5\n"
    rows = read_text(tmp_path, text, schema, delimiter=";", decimal_point=",", timestamp_formats=["%d.%m.%Y %H:%M"])
    assert rows == [{"t": datetime(2026, 12, 31, 10), "x": 1.5}]
    assert read_text(tmp_path, 'a\tb\n"5\t1\n', delimiter="\t", quote=None) == [{"a": '"5', "b": 1}]
    assert read_text(tmp_path, "a,b\n'x,\ny',1\n", quote="'") == [{"a": "x,\ny", "b": 1}]


def test_bad_records_have_the_line_and_a_reason(tmp_path: Path) -> None:
    text = 'a,b\n"x\ny",1\nz,one\n\nw,1,2\nv\n"q\n\n",2\nu,99999999999999999999\nok,3\n'
    path = write(tmp_path / "a.csv", text)
    rows, bad = read(CsvFiles(path, SCHEMA, required=["a"]))
    assert rows == [{"a": "x\ny", "b": 1}, {"a": "q\n\n", "b": 2}, {"a": "ok", "b": 3}]
    assert [(row["position"].split(" ", 1)[1], row["problem"], row["record"]) for row in bad] == [
        ("line 4 (byte 12)", "field 'b': invalid value 'one'", "z,one"),
        ("line 6 (byte 19)", "it has 3 fields, not 2", "w,1,2"),
        ("line 7 (byte 25)", "it has 1 fields, not 2", "v"),
        ("line 11 (byte 35)", "field 'b': invalid value '99999999999999999999'", "u,99999999999999999999"),
    ]


def test_a_quote_that_is_never_closed_costs_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'a,b\nx,1\n"open,2\ny,3\nz,4\n')
    rows, bad = read(CsvFiles(path, SCHEMA))
    assert rows == [{"a": "x", "b": 1}, {"a": "y", "b": 3}, {"a": "z", "b": 4}]
    assert [(row["problem"], row["record"]) for row in bad] == [
        ("a quote is not closed until the end of the file", '"open,2')
    ]
    rows, bad = read(CsvFiles(path, SCHEMA, line_bytes_max=10))
    assert rows == [{"a": "x", "b": 1}, {"a": "y", "b": 3}, {"a": "z", "b": 4}]
    assert [row["problem"] for row in bad] == ["a quote is not closed within 10 bytes"]


@pytest.mark.parametrize("last", ['y,"2', '"y,2', 'y,"', 'y,"2""'])
def test_a_quote_that_is_not_closed_in_a_last_line_without_line_end_costs_it(last: str, tmp_path: Path) -> None:
    rows, bad = read(CsvFiles(write(tmp_path / "a.csv", f"b,a\n1,x\n{last}"), {"a": str, "b": str}))
    assert rows == [{"a": "x", "b": "1"}]
    assert [(row["problem"], row["record"]) for row in bad] == [
        ("a quote is not closed until the end of the file", last)
    ]


@pytest.mark.parametrize("blank", [b"\n", b"\r\n\r\n", b"\xef\xbb\xbf\n"])
def test_blank_lines_before_the_header_are_nothing(blank: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", blank + b'"a",b\nx,1\ny,2\n')
    assert read_text(tmp_path, path.read_bytes()) == [{"a": "x", "b": 1}, {"a": "y", "b": 2}]
    check_source(CsvFiles(path, SCHEMA), parallelisms=(1,))


def test_a_quote_within_a_field_is_text(tmp_path: Path) -> None:
    text = 'a,b\n5" pipe,1\n6" pipe,2\n"7"" pipe",3\n8"",4\n""9,5\n"x"y"z,6\n'
    found = [row["a"] for row in read_text(tmp_path, text)]
    assert found == ['5" pipe', '6" pipe', '7" pipe', '8""', "9", 'xy"z']


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a,b\n")
    for options, words in [
        ({"delimiter": ";;"}, "delimiter=';;'"),
        ({"delimiter": "\n"}, "must be one character"),
        ({"quote": ","}, "must differ"),
        ({"null_values": "NA"}, "lists of texts"),
        ({"required": ["c"]}, "required field 'c'"),
    ]:
        with pytest.raises(UsageError, match=words):
            CsvFiles(path, SCHEMA, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="which CSV cannot express"):
        CsvFiles(path, {"a": pa.list_(pa.int64())})
    long = write(tmp_path / "long.csv", "a,b" * 100 + "\n")
    with pytest.raises(UsageError, match="does not begin with a header"):
        read(CsvFiles(long, SCHEMA, line_bytes_max=20))


def test_the_conformance_kit(tmp_path: Path) -> None:
    for index in range(3):
        rows = [(f"file {index}\nline {at}", at) for at in range(20)]
        write(tmp_path / f"{index}.csv", as_written(rows))
    check_source(CsvFiles(tmp_path, SCHEMA), parallelisms=(1, 2))


WORDS = ["x", "", '"', "\n", "\r\n", ",", 'a "b" c', "two\nlines", "ä", "long " * 5]


@pytest.mark.parametrize("seed", few(range(12), 4))
def test_any_text_is_read_as_it_was_written_from_any_position(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_ = random.Random(seed)
    monkeypatch.setattr(line_file, "BLOCK_BYTES", random_.choice([1, 3, 7, 50]))
    monkeypatch.setattr(line_file, "ROWS_MAX", random_.choice([1, 2, 5]))
    rows = [("".join(random_.choices(WORDS, k=3)), at) for at in range(30)]
    quoting = random_.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC])
    text = as_written(rows, lineterminator=random_.choice(["\n", "\r\n"]), quoting=quoting)
    source = CsvFiles(write(tmp_path / "a.csv", text), SCHEMA)
    source.schema()
    expected = [{"a": a or None if quoting == csv.QUOTE_MINIMAL else a, "b": b} for a, b in rows]
    found: list[dict[str, Any]] = []
    positions: dict[str, bytes] | None = None
    while len(found) < len(rows):
        reader = source.open(context(positions=positions))
        for _ in range(random_.randrange(1, 200)):
            batch = reader.poll()
            if batch is not None:
                assert batch.bad is None
                found += batch.batch.to_pylist()
        positions = dict(reader.positions())
    assert found == expected


def test_a_growing_file_gives_a_record_when_it_is_complete(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'a,b\n"x\n')
    source = CsvFiles(path, SCHEMA, follow=True, poll_interval="1ms")
    source.schema()
    reader = source.open(context())
    for _ in range(5):
        assert reader.poll() is None
    with open(path, "a") as file:
        file.write('y",1\nz,')
    batches = (reader.poll() for _ in range(1_000_000))
    assert next(batch for batch in batches if batch is not None).batch.to_pylist() == [{"a": "x\ny", "b": 1}]


def test_files_of_a_sink_are_read_as_they_were(tmp_path: Path) -> None:
    table = pa.table(
        {
            "s": ["", None, 'a "b",\nc'],
            "i": [1, None, -3],
            "d": pa.array([Decimal("1.20"), None, Decimal("-3.00")], pa.decimal128(10, 2)),
            "y": [True, None, False],
            "t": pa.array([datetime(2026, 1, 2, 3, 4, 5, 6), None, None], pa.timestamp("us")),
            "u": pa.array([datetime(2026, 1, 2, tzinfo=UTC), None, None], pa.timestamp("us", "UTC")),
            "day": pa.array([datetime(2026, 1, 2).date(), None, None]),
        }
    )
    check_format("csv", table.schema)
    write(tmp_path / "a.csv", bytes(encode("csv", table)))
    assert read(CsvFiles(tmp_path, table.schema))[0] == table.to_pylist()
    for dtype in (pa.list_(pa.int64()), pa.duration("us"), pa.large_binary()):
        with pytest.raises(UsageError, match="which CSV cannot hold"):
            check_format("csv", pa.schema([("a", dtype)]))


@pytest.mark.parametrize(
    ("dtype", "text", "good"),
    [
        (pa.float64(), "1e400", "1e300"),
        (pa.float32(), "-1e400", "-Infinity"),
        (pa.int8(), "0xFF", "7"),
        (pa.int64(), "0XFFFFFFFFFFFFFFFF", "007"),
        (pa.decimal128(5, 2), "1000", "999.99"),
        (pa.decimal128(38, 2), "9" * 38, "9" * 36),
        (pa.decimal128(38, 2), "89372036854775807000000000000000000000", "1"),
    ],
)
def test_a_number_that_its_type_cannot_hold_is_a_bad_record(
    dtype: pa.DataType, text: str, good: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.csv", f"a,b\n{good},1\n{text},2\n,3\n{good},4\n")
    rows, bad = read(CsvFiles(path, {"a": dtype, "b": pa.int64()}))
    assert [row["b"] for row in rows] == [1, 3, 4]
    assert [row["record"] for row in bad] == [f"{text},2"]
    assert f"'a' is {dtype}, which cannot hold" in bad[0]["problem"]


@pytest.mark.parametrize(
    ("form", "texts", "wrong"),
    [
        ("%d/%m/%Y", ["28/02/2023", "1/3/2023", "29/02/2024"], ["31/02/2023", "29/02/2023", "31/04/2023"]),
        ("%d.%m.%y %H:%M:%S", ["31.12.24 23:59:59"], ["31.12.24 23:59:60"]),
        ("%d %b %Y %I:%M %p", ["01 jan 2024  1:30 PM", "1 Mar 2024 12:00 am"], ["30 Feb 2024 1:00 AM"]),
        ("%d.%m.%Y %H:%M %z", ["28.02.2023 10:00 +0200", "1.3.2023 0:30 +0200"], ["29.02.2023 10:00 +0200"]),
        ("%Y %j", ["2024 366"], []),
        ("%s", ["1704067200"], []),
        ("%G-%V-%u", [], ["2024-10-3"]),
    ],
)
def test_a_day_that_is_not_in_the_calendar_is_a_bad_record(
    form: str, texts: list[str], wrong: list[str], tmp_path: Path
) -> None:
    lines = [f"{text},{number}" for number, text in enumerate([*texts, "", "2026-01-02T03:04:05Z", *wrong])]
    path = write(tmp_path / "a.csv", "\n".join(["a,b", *lines]))
    zone = "UTC" if "%z" in form else None
    iso = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC if zone else None)
    rows, bad = read(CsvFiles(path, {"a": pa.timestamp("us", zone), "b": pa.int64()}, timestamp_formats=[form]))
    assert [row["record"].rpartition(",")[0] for row in bad] == wrong
    found = [row["a"] for row in rows]
    assert found[len(texts) :] == [None, iso]
    plain = [datetime.strptime(text, form) if form != "%s" else datetime(2024, 1, 1) for text in texts]
    assert found[: len(texts)] == plain


def test_offsets_in_a_format_of_the_user_are_converted_where_times_are_local(tmp_path: Path) -> None:
    rows = read_text(
        tmp_path, "t\n01.01.2024 10:00 +0200\n", {"t": pa.timestamp("us")}, timestamp_formats=["%d.%m.%Y %H:%M %z"]
    )
    assert rows == [{"t": datetime(2024, 1, 1, 8)}]
    with pytest.raises(UsageError, match="names of zones are not read"):
        CsvFiles(tmp_path, {"t": pa.timestamp("us")}, timestamp_formats=["%d.%m.%Y %Z"])


def test_a_mark_of_byte_order_is_text_where_no_file_begins(tmp_path: Path) -> None:
    rows = read_text(tmp_path, "\ufeffa,b\n\ufeffx,1\n\ufeffy,2\n")
    assert [row["a"] for row in rows] == ["\ufeffx", "\ufeffy"]


def test_a_file_with_carriage_returns_alone_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a,b\rx,1\ry,2\r")
    with pytest.raises(UsageError, match="its lines end with carriage returns alone"):
        read(CsvFiles(path, SCHEMA))
    assert read_text(tmp_path, '"a",b,"c\rd"\r\nx,1,2\r\n') == [{"a": "x", "b": 1}]
    rows, bad = read(CsvFiles(write(path, "x,1\ry,2\r"), SCHEMA, header=False))
    assert (rows, len(bad)) == ([], 1)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (pa.int64(), [1, None, 3, None]),
        (pa.timestamp("us"), [None, datetime(2026, 1, 2)]),
        (pa.decimal128(5, 2), [None, None]),
        (pa.bool_(), [True, None]),
        (pa.large_string(), ["", "a\n\nb"]),
    ],
    ids=["int", "time", "decimal", "bool", "text"],
)
def test_one_column_of_a_sink_has_all_its_rows(dtype: pa.DataType, values: list[Any], tmp_path: Path) -> None:
    table = pa.table({"x": pa.array(values, dtype)})
    write(tmp_path / "a.csv", bytes(encode("csv", table)))
    assert [row["x"] for row in read(CsvFiles(tmp_path, table.schema))[0]] == values


def test_one_column_of_text_with_a_null_is_no_csv() -> None:
    with pytest.raises(UsageError, match="its line in CSV would be blank"):
        encode("csv", pa.table({"x": pa.array(["a", None])}))
