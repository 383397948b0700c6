"""Objects that are all written alike give what a parser gives, and so do those that only seem to be.

Blocks of fewer than ``ROWS_MIN`` lines are parsed: these are the judge.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.connectors.files import json_shape
from headgate.connectors.files.json_shape import ShapedReader
from headgate.connectors.files.line_decoders import Decoded, JsonDecoder, TextDecoder
from headgate.connectors.files.lines import Lines, RawLines

ROWS_MIN = 16
"""Fewer than usual: the parser, which is the judge, parses every line that it refuses by itself."""


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_shape, "ROWS_MIN", ROWS_MIN)
        yield


SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("small", pa.int16()),
        ("name", pa.large_string()),
        ("amount", pa.float64()),
        ("on", pa.bool_()),
    ]
)
PLAIN = b'{"id": 7, "name": "n\xc3\xa9", "amount": 0.25, "on": true, "more": -1e3}'


def lines_of(texts: Sequence[bytes], begin: int = 0) -> Lines:
    return Lines(pa.array(texts, pa.large_binary()), np.arange(begin, begin + len(texts)))


def raw_lines_of(texts: Sequence[bytes]) -> Lines:
    data = b"".join(text + b"\n" for text in texts)
    ends = np.cumsum([len(text) + 1 for text in texts]) - 1
    raw = RawLines(data, ends, 0)
    return Lines(None, raw.starts(), raw=raw)


def columns_of(texts: Sequence[bytes], schema: pa.Schema = SCHEMA) -> pa.RecordBatch | None:
    """Return what is read without a parser."""
    ends = np.cumsum([len(text) for text in texts])
    return ShapedReader(schema).read(b"".join(texts), np.concatenate(([0], ends[:-1])), ends)


def parsed(texts: Sequence[bytes], schema: pa.Schema, required: Sequence[str]) -> tuple[object, ...]:
    few = ROWS_MIN - 1
    decoder = JsonDecoder(schema, required)
    parts = [decoder.decode(lines_of(texts[at : at + few], at)) for at in range(0, len(texts), few)]
    rows = [row for part in parts for row in _exact(part)]
    starts = [start for part in parts for start in part.starts.tolist()]
    refused = [(s, p) for part in parts for s, p in zip(part.refused.starts, part.refused.problems, strict=True)]
    return rows, starts, sorted(refused)


def whole(decoded: Decoded) -> tuple[object, ...]:
    refused = sorted(zip(decoded.refused.starts, decoded.refused.problems, strict=True))
    return _exact(decoded), decoded.starts.tolist(), refused


def _exact(decoded: Decoded) -> list[str]:
    """Return rows as texts, which tell 0.0 from -0.0, and in which NaN is equal to itself."""
    return [repr(row) for row in decoded.batch.to_pylist()]


def test_lines_that_are_written_alike_need_no_parser() -> None:
    texts = [PLAIN.replace(b"7", str(n).encode()) for n in range(ROWS_MIN)]
    found = columns_of(texts)
    assert found is not None
    assert found.column("id").to_pylist() == list(range(ROWS_MIN))
    assert found.column("name").to_pylist() == ["né"] * ROWS_MIN
    assert found.column("amount").to_pylist() == [0.25] * ROWS_MIN
    assert found.column("on").to_pylist() == [True] * ROWS_MIN
    assert found.column("small").null_count == ROWS_MIN
    assert columns_of(texts[1:]) is None


@pytest.mark.parametrize(
    "other",
    [
        b"",
        b"{}",
        b"null",
        b" " + PLAIN,
        PLAIN + b" ",
        PLAIN + PLAIN,
        PLAIN[:-1],
        PLAIN[1:],
        PLAIN.replace(b"7", b"07"),
        PLAIN.replace(b"7", b"-0"),
        PLAIN.replace(b"7", b"-"),
        PLAIN.replace(b"7", b"7.0"),
        PLAIN.replace(b"7", b"0x7"),
        PLAIN.replace(b"7", b"+7"),
        PLAIN.replace(b"7", b"7 "),
        PLAIN.replace(b"7", b"9223372036854775808"),
        PLAIN.replace(b"7", b"null"),
        PLAIN.replace(b"7", b"nul"),
        PLAIN.replace(b"7", b"[7]"),
        PLAIN.replace(b"7", b'"7"'),
        PLAIN.replace(b"7", b'7, "id": 8'),
        PLAIN.replace(b'"id"', b'"di"'),
        PLAIN.replace(b'"id"', b'"i\\u0064"'),
        PLAIN.replace(b"0.25", b".25"),
        PLAIN.replace(b"0.25", b"1."),
        PLAIN.replace(b"0.25", b"00.25"),
        PLAIN.replace(b"0.25", b"1.2.3"),
        PLAIN.replace(b"0.25", b"1e400"),
        PLAIN.replace(b"0.25", b"5e-324"),
        PLAIN.replace(b"0.25", b"nan"),
        PLAIN.replace(b"0.25", b"inf"),
        PLAIN.replace(b"0.25", b"0.1000000000000000055511151231257827"),
        PLAIN.replace(b"true", b"True"),
        PLAIN.replace(b"true", b"1"),
        PLAIN.replace(b"true", b"false"),
        PLAIN.replace(b"-1e3", b"01"),
        PLAIN.replace(b"-1e3", b'"x"'),
        PLAIN.replace(b"-1e3", b"{}"),
        PLAIN.replace(b"n\xc3\xa9", b"\xff"),
        PLAIN.replace(b"n\xc3\xa9", b"\x01"),
        PLAIN.replace(b"n\xc3\xa9", b"a\nb"),
        PLAIN.replace(b"n\xc3\xa9", b'a\\"b'),
        PLAIN.replace(b"n\xc3\xa9", b'", "name": "'),
        PLAIN.replace(b'"n\xc3\xa9"', b"null"),
        PLAIN.replace(b'"n\xc3\xa9"', b"1"),
        PLAIN.replace(b'"name"', b'"small": 40000, "name"'),
    ],
)
def test_a_line_that_is_written_otherwise_is_read_or_refused_as_ever(other: bytes) -> None:
    for at, count in ((5, 1), (0, ROWS_MIN)):
        texts = [PLAIN] * ROWS_MIN
        texts[at : at + count] = [other] * count
        texts += [PLAIN] * 3
        expected = parsed(texts, SCHEMA, ["amount"])
        assert whole(JsonDecoder(SCHEMA, ["amount"]).decode(lines_of(texts))) == expected


NAMES = ["id", "small", "name", "amount", "on", "more", "é", ""]
TEXTS = st.text(string.printable + 'é€😀"\\\x01{}[]:,', max_size=6)
VALUES = st.one_of(
    st.integers(-(2**64), 2**64), st.integers(0, 300), st.floats(), TEXTS, st.booleans(), st.none(),
    st.sampled_from([[], {}, [1], {"id": 1}]),
)  # fmt: skip


@st.composite
def blocks(draw: st.DrawFn) -> list[bytes]:
    """Draw lines of some shapes, each with values of a kind of its own, and damage some."""
    like = {
        "int": st.integers(-(10**19), 10**19) | st.integers(0, 9),
        "float": st.floats(width=64) | st.floats(0, 10).map(lambda one: round(one, 2)),
        "text": st.text(string.ascii_letters + "é, :{}", max_size=6),
        "any": VALUES,
        "truth": st.booleans() | st.none(),
    }
    names = draw(st.lists(st.sampled_from(NAMES), max_size=6))
    kinds = [draw(st.sampled_from(sorted(like))) for _ in names]
    spaces = draw(st.sampled_from([(", ", ": "), (",", ":"), (" , ", " : ")]))
    some = [[draw(like[kind]) for kind in kinds] for _ in range(draw(st.integers(1, 4)))]
    texts = [
        "{"
        + spaces[0].join(
            json.dumps(n, ensure_ascii=False) + spaces[1] + json.dumps(v) for n, v in zip(names, row, strict=True)
        )
        + "}"
        for row in some
    ]
    lines = [texts[n % len(texts)].encode("utf-8", "surrogatepass") for n in range(ROWS_MIN + 1)]
    for _ in range(draw(st.integers(0, 2))):
        at, place = draw(st.integers(0, ROWS_MIN)), draw(st.integers(0, 80))
        lines[at] = (
            lines[at][:place]
            + draw(st.sampled_from([b"", b"0", b" ", b'"', b",", b"}", b"-", b"\xff"]))
            + lines[at][place + 1 :]
        )
    return lines


@given(blocks(), st.sampled_from([[], ["id"]]))
def test_blocks_are_read_as_by_a_parser(lines: list[bytes], required: list[str]) -> None:
    assert whole(JsonDecoder(SCHEMA, required).decode(lines_of(lines))) == parsed(lines, SCHEMA, required)


@given(blocks())
def test_files_are_read_as_by_a_parser(lines: list[bytes]) -> None:
    lines = [line.replace(b"\n", b"") for line in lines]
    raw = raw_lines_of(lines)
    rows, starts, refused = whole(JsonDecoder(SCHEMA).decode(raw))
    begins = {start: number for number, start in enumerate(raw.starts.tolist())}
    assert isinstance(starts, list)
    assert isinstance(refused, list)
    found = (rows, [begins[start] for start in starts], sorted((begins[start], problem) for start, problem in refused))
    assert found == parsed(lines, SCHEMA, [])


def test_another_shape_is_found_again_after_some_blocks() -> None:
    reader, alike = ShapedReader(SCHEMA), [PLAIN] * ROWS_MIN
    other = [PLAIN, *[b"{}"] * ROWS_MIN]

    def read(texts: Sequence[bytes]) -> bool:
        ends = np.cumsum([len(text) for text in texts])
        return reader.read(b"".join(texts), np.concatenate(([0], ends[:-1])), ends) is not None

    assert read(alike)
    assert not read(other)
    assert [read(alike) for _ in range(3)] == [False, True, True]
    assert read([b'{"id":1}'] * ROWS_MIN)


TIMES = [
    *("2015-07-15", "2015-07-15Z", "2015-07-15T01:02", "2015-07-15T01:02+02:00", "2015-07-15 01:02:03"),
    *("1969-12-31T23:59:59", "1969-12-31T23:59:59.5", "1969-12-31T23:59:59.123456789Z"),
    *(f"2015-07-15T01:02:03{end}" for end in ("", ".5", ".123", ".123456", ".123456789", "Z", "+02:00", ".123Z", "x")),
]


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_are_read_as_by_a_parser(unit: str, zone: str | None) -> None:
    schema = pa.schema([("at", pa.timestamp(unit, zone))])
    for time in TIMES:
        texts = [b'{"at":"%s"}' % time.encode()] * ROWS_MIN
        assert whole(JsonDecoder(schema).decode(lines_of(texts))) == parsed(texts, schema, [])


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_times_that_are_written_in_several_ways_are_read_as_by_a_parser(zone: str | None) -> None:
    schema = pa.schema([("at", pa.timestamp("us", zone))])
    for time in TIMES:
        texts = [b'{"at":"%s"}' % time.encode()] * (ROWS_MIN - 1)
        texts += [b'{"at":"2015-07-15T01:02:03Z"}', b'{"at":"2015-07-15T01:02:03"}']
        assert whole(JsonDecoder(schema).decode(lines_of(texts))) == parsed(texts, schema, [])


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
@pytest.mark.parametrize("end", ["", "Z", "+02:00"])
def test_times_that_are_written_alike_need_no_parser(zone: str | None, end: str) -> None:
    texts = [b'{"at":"2015-07-15T01:02:03%s"}' % end.encode()] * ROWS_MIN
    assert columns_of(texts, pa.schema([("at", pa.timestamp("us", zone))])) is not None


NUMBERS = [*(f"{10**n + n}" for n in range(18)), *("0", "0.5", "10.25", "1234.56", "99999.9", "0.000001", "123456.75")]


@pytest.mark.parametrize("first", NUMBERS)
def test_numbers_of_any_length_stand_beside_each_other(first: str) -> None:
    schema = pa.schema([("n", pa.float64()), ("m", pa.int64())])
    wholes = [number for number in NUMBERS if "." not in number]
    for others in (NUMBERS, NUMBERS[:8], [number for number in NUMBERS if len(number) < 9]):
        texts = [
            f'{{"n":{n},"m":{wholes[at % len(wholes)]}}}'.encode() for at, n in enumerate([first, *others] * ROWS_MIN)
        ]
        assert whole(JsonDecoder(schema).decode(lines_of(texts))) == parsed(texts, schema, [])
        found = columns_of(texts, schema)
        assert found is not None
        assert found.column("n").to_pylist() == [float(n) for n in [first, *others] * ROWS_MIN]


@pytest.mark.parametrize("end", ["", ',"end":"2015"', ',"end":1', ',"end":"x","more":true'])
@pytest.mark.parametrize("lengths", [(4, 2), (0, 1), (0, 40), (8, 16), (26, 24, 7), (3, 3)])
def test_texts_of_any_length_stand_beside_each_other(lengths: tuple[int, ...], end: str) -> None:
    schema = pa.schema([("a", pa.large_string()), ("b", pa.large_string()), ("n", pa.int32())])
    texts = [
        f'{{"a":"{"é,:{}"[:1] * length}","n":{n},"b":"{"y" * (3 * length)}"{end}}}'.encode()
        for n, length in enumerate([*lengths] * ROWS_MIN)
    ]
    assert columns_of(texts, schema) is not None
    assert whole(JsonDecoder(schema).decode(lines_of(texts))) == parsed(texts, schema, [])


@pytest.mark.parametrize("text", [b'{"":7}', b'{"":""}', b'{"a":1}', b'{"a":true,"":"x"}'])
def test_the_shortest_objects_are_read(text: bytes) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.large_string())])
    texts = [text] * ROWS_MIN
    assert whole(JsonDecoder(schema).decode(lines_of(texts))) == parsed(texts, schema, [])
    assert whole(JsonDecoder(schema).decode(raw_lines_of(texts)))[0] == parsed(texts, schema, [])[0]


@pytest.mark.parametrize("before", range(9))
def test_objects_may_begin_anywhere_in_memory(before: int) -> None:
    texts = [PLAIN.replace(b"7", b"7" * (n % 9 + 1)) for n in range(ROWS_MIN)]
    ends = before + np.cumsum([len(text) for text in texts])
    starts = np.concatenate(([before], ends[:-1]))
    memory = b'"' * before + b"".join(texts) + b'"}'
    for data in (memory, memoryview(memory), pa.py_buffer(memory)):
        found = ShapedReader(SCHEMA).read(data, starts, ends)
        assert found is not None
        assert found.column("id").to_pylist() == [int("7" * (n % 9 + 1)) for n in range(ROWS_MIN)]


@pytest.mark.parametrize(
    "other",
    [
        b'{"a":"x","b":1,"c":"yy"}',
        b'{"a":"x" ,"b":1,"c":"y"}',
        b'{"a":"xx","b":1 ,"c":"y"}',
        b'{"a":"x","b":,"c":"y"}',
        b'{"a":"x","b":"1","c":y}',
        b'{"a":"x,"b":1,"c":""y"}',
        b'{"a":"","b":1,"c":"","c":1}',
        b'{"a":"x","c":"y","b":1}',
        b'{"a":"x","b":1,"c":"y"},',
        b'{"a":"x","b":1,"c":"y"}}',
        b'[{"a":"x","b":1,"c":"y"}]',
        b'{"a":"x","b":1,2,"c":"y"}',
        b'{"a":"x","b":1.5.5,"c":"y"}',
        b'{"a":"x","b":.5,"c":"y"}',
        b'{"a":"x","b":5.,"c":"y"}',
        b'{"a":"x","b":1:2,"c":"y"}',
        b'{"a":"x","b":1/2,"c":"y"}',
    ],
)
def test_what_only_seems_to_be_alike_is_read_or_refused_as_ever(other: bytes) -> None:
    schema = pa.schema([("a", pa.large_string()), ("b", pa.float64()), ("c", pa.large_string())])
    plain = b'{"a":"x","b":1,"c":"y"}'
    for columns in (schema, schema.remove(1), schema.remove(2)):
        for at in (0, 5, ROWS_MIN):
            texts = [plain] * (ROWS_MIN + 1)
            texts[at] = other
            assert whole(JsonDecoder(columns).decode(lines_of(texts))) == parsed(texts, columns, [])


def numbered_lines(values: list[bytes]) -> Lines:
    lengths = [len(value) + 1 for value in values]
    return Lines(pa.array(values, pa.large_binary()), np.cumsum([0, *lengths[:-1]]))


class CountingDecoder(JsonDecoder):
    """Counts the lines that are parsed."""

    parsed = 0

    def _parse(self, text: pa.Buffer, rows: int) -> pa.RecordBatch:
        self.parsed += rows
        return super()._parse(text, rows)


@pytest.mark.parametrize("at", [0, 1_234, 4_095])
def test_one_bad_line_costs_two_more_passes_over_its_block(at: int) -> None:
    values = [b'{"n":%d,"of":{}}' % number for number in range(4_096)]  # not flat: it needs the parser
    sound = CountingDecoder(pa.schema([("n", pa.int64())]))
    assert sound.decode(numbered_lines(values)).batch.num_rows == sound.parsed == 4_096
    values[at] = b'{"n":"x"}'
    decoder = CountingDecoder(pa.schema([("n", pa.int64())]))
    decoded = decoder.decode(numbered_lines(values))
    assert decoded.batch.column(0).to_pylist() == [number for number in range(4_096) if number != at]
    assert len(decoded.refused.problems) == 1
    assert decoder.parsed <= 3 * 4_096


def test_lines_of_a_slice_are_those_of_the_slice() -> None:
    values = pa.array(["é", "a", "bc"], pa.large_string()).cast(pa.large_binary()).slice(1)
    assert TextDecoder("text").decode(Lines(values, np.array([3, 5]))).batch.column(0).to_pylist() == ["a", "bc"]


USER = pa.struct([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def test_a_field_that_is_required_at_any_depth_is_missing_in_a_bad_record() -> None:
    schema = pa.schema(
        [
            ("user", USER),
            ("tags", pa.list_(pa.field("item", pa.string(), nullable=False))),
            ("friends", pa.list_(pa.struct([pa.field("user", USER)]))),
        ]
    )
    sound = [
        b'{"user":{"id":1,"name":null},"tags":["a"],"friends":[{"user":{"id":2}},null,{"user":null}]}',
        b'{"user":null,"tags":null,"friends":null}',
        b"{}",
    ]
    bad = {
        b'{"user":{"name":"x"}}': "user.id",
        b'{"user":{"id":null}}': "user.id",
        b'{"tags":["a",null]}': "tags[]",
        b'{"friends":[{"user":{"id":1}},{"user":{}}]}': "friends[].user.id",
    }
    decoded = JsonDecoder(schema).decode(numbered_lines([sound[0], *bad, *sound[1:]]))
    assert decoded.batch.num_rows == 3
    assert decoded.batch.column("user").to_pylist() == [{"id": 1, "name": None}, None, None]
    assert len(decoded.starts) == 3
    assert dict(zip(decoded.refused.texts, decoded.refused.problems, strict=True)) == {
        line.decode(): f"field '{path}' is missing or null" for line, path in bad.items()
    }


ODD_LINES = [
    b'{"n":1,"t":"a"}',
    b'{"n":2,"t":"\xc3\xa4","unknown":[{"n":3}]}',
    b'  {"n":3} ',
    b'{"n":4,"t":"}"}\r',
    b'{"n":5}\r\r',
    b"",
    b"\r",
    b"{}",
    b"{",
    b'{"n":6}{"n":7}',
    b'{"n":8,"n":9}',
    b'{"n":9223372036854775808}',
    b'{"n":"x"}',
    b'{"n":1e2}',
    b'{"n":10,"t":"\xff"}',
    b"null",
    b"[1]",
    b'{"t":"}',
    b'{"}',
    b'{"n":',
    b"11}",
    b'{"n":null,"t":null}',
]
ODD_SCHEMA = pa.schema([("n", pa.int64()), ("t", pa.string())])


@given(
    chosen=st.lists(st.one_of(st.just(ODD_LINES[0]), st.sampled_from(ODD_LINES)), min_size=1, max_size=30),
    cuts=st.lists(st.integers(1, 29), max_size=4),
    begins_with_mark=st.booleans(),
    required=st.sampled_from([(), ("n",)]),
)
def test_any_blocks_of_lines_have_the_records_and_places_of_single_lines(
    chosen: list[bytes], cuts: list[int], begins_with_mark: bool, required: tuple[str, ...]
) -> None:
    if begins_with_mark:
        chosen = [b"\xef\xbb\xbf" + chosen[0], *chosen[1:]]
    decoder = JsonDecoder(ODD_SCHEMA, required)
    expected = found_in(decoder, chosen, range(len(chosen) + 1))
    assert found_in(decoder, chosen, sorted({0, len(chosen), *(cut for cut in cuts if cut < len(chosen))})) == expected


def found_in(decoder: JsonDecoder, lines: list[bytes], cuts: Sequence[int]) -> list[tuple[int, object]]:
    """Decode the lines between the cuts as blocks of a file; return what is found at each byte."""
    found: list[tuple[int, object]] = []
    base = 0
    for low, high in pairwise(cuts):
        data = b"".join(line + b"\n" for line in lines[low:high])
        raw = RawLines(data, np.flatnonzero(np.frombuffer(data, np.uint8) == 10), base)
        decoded = decoder.decode(Lines(None, raw.starts(), raw=raw))
        found += zip(decoded.starts.tolist(), decoded.batch.to_pylist(), strict=True)
        found += zip(
            decoded.refused.starts, zip(decoded.refused.problems, decoded.refused.texts, strict=True), strict=True
        )
        base += len(data)
    return sorted(found, key=lambda each: each[0])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"a":1,"a":2}', "field 'a' is there twice"),
        ('{"s":{"x":1,"x":2}}', "field 's.x' is there twice"),
        ('{"a":1,"other":"\\ud800"}', "The surrogate pair in string is invalid"),
        ('{"a":1,"other":1e400}', "Number too big to be stored in double"),
        ('{"a":"x"}', "field 'a' is int64, which cannot hold \"x\""),
    ],
)
def test_a_problem_names_what_is_wrong(line: str, problem: str) -> None:
    schema = pa.schema([("a", pa.int64()), ("s", pa.struct([("x", pa.int64())]))])
    values = pa.array([line.encode(), b'{"a":3}'], pa.large_binary())
    decoded = JsonDecoder(schema).decode(Lines(values, np.arange(2)))
    assert decoded.batch.column("a").to_pylist() == [3]
    assert decoded.refused.problems == [problem]


COUNTS = pa.map_(pa.string(), pa.int64())


@pytest.mark.parametrize(
    ("dtype", "text", "expected"),
    [
        (COUNTS, '{"a": 1, "": null, "ä\\"": 3}', [("a", 1), ("", None), ('ä"', 3)]),
        (COUNTS, "{}", []),
        (COUNTS, "null", None),
        (COUNTS, '{"a": 1, "a": 2}', [("a", 2)]),
        (COUNTS, '[{"key": "a", "value": 1}]', [("a", 1)]),
        (pa.map_(pa.int64(), pa.bool_()), '{"-1": true}', [(-1, True)]),
        (pa.map_(pa.bool_(), pa.float64()), '{"true": 1e3}', [(True, 1_000.0)]),
        (pa.map_(pa.string(), pa.date32()), '{"a": "2024-02-29"}', [("a", date(2024, 2, 29))]),
    ],
)
def test_an_object_is_a_map(dtype: pa.DataType, text: str, expected: list[tuple[object, object]] | None) -> None:
    decoder = JsonDecoder(pa.schema([("id", pa.int64()), ("map", dtype)]))
    decoded = decoder.decode(numbered_lines([f'{{"map": {text}, "id": 7, "other": {{}}}}'.encode(), b'{"id": 8}']))
    assert decoded.refused.problems == []
    entries = None if expected is None else [{"key": key, "value": value} for key, value in expected]
    assert decoded.batch.to_pylist() == [{"id": 7, "map": entries}, {"id": 8, "map": None}]


def test_maps_within_maps_lists_and_structs() -> None:
    inner = pa.list_(pa.struct([("counts", COUNTS), ("n", pa.int64())]))
    decoder = JsonDecoder(pa.schema([("deep", pa.map_(pa.string(), inner))]))
    decoded = decoder.decode(numbered_lines([b'{"deep": {"k": [{"counts": {"a": 1}, "n": 2, "other": 3}, null, {}]}}']))
    (row,) = decoded.batch.to_pylist()
    found = [{"counts": [{"key": "a", "value": 1}], "n": 2}, None, {"counts": None, "n": None}]
    assert row == {"deep": [{"key": "k", "value": found}]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"map": {"a": "x"}}', 'field \'map\' is map<string, int64>, which cannot hold {"a": "x"}'),
        ('{"map": 5}', "field 'map' is map<string, int64>, which cannot hold 5"),
        ('{"map": {"a": 1}', "Missing a comma or '}' after an object member"),
        ('{"map": {}} {"map": {}}', "several JSON values on one line"),
        ('{"map": null}', "field 'map' is missing or null"),
    ],
)
def test_what_is_no_map_is_a_bad_record(text: str, problem: str) -> None:
    decoded = JsonDecoder(pa.schema([("map", COUNTS)]), ["map"]).decode(numbered_lines([b'{"map": {}}', text.encode()]))
    assert decoded.refused.problems == [problem]
    assert decoded.batch.num_rows == 1


def test_a_key_cannot_write_what_follows_it() -> None:
    decoder = JsonDecoder(pa.schema([("map", pa.map_(pa.int64(), pa.int64()))]))
    decoded = decoder.decode(numbered_lines([rb'{"map": {"1, \"value\": 3}, {\"key\": 4": 5}}']))
    assert decoded.batch.num_rows == 0
    assert len(decoded.refused.problems) == 1
