"""Lines to records: what a bad line costs, and what each kind of refusal says."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.connectors.files.line_decoders import JsonDecoder, TextDecoder
from headgate.connectors.files.line_file import Lines, RawLines


def lines_of(values: list[bytes]) -> Lines:
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
    assert sound.decode(lines_of(values)).batch.num_rows == sound.parsed == 4_096
    values[at] = b'{"n":"x"}'
    decoder = CountingDecoder(pa.schema([("n", pa.int64())]))
    decoded = decoder.decode(lines_of(values))
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
    decoded = JsonDecoder(schema).decode(lines_of([sound[0], *bad, *sound[1:]]))
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
    decoded = decoder.decode(lines_of([f'{{"map": {text}, "id": 7, "other": {{}}}}'.encode(), b'{"id": 8}']))
    assert decoded.refused.problems == []
    entries = None if expected is None else [{"key": key, "value": value} for key, value in expected]
    assert decoded.batch.to_pylist() == [{"id": 7, "map": entries}, {"id": 8, "map": None}]


def test_maps_within_maps_lists_and_structs() -> None:
    inner = pa.list_(pa.struct([("counts", COUNTS), ("n", pa.int64())]))
    decoder = JsonDecoder(pa.schema([("deep", pa.map_(pa.string(), inner))]))
    decoded = decoder.decode(lines_of([b'{"deep": {"k": [{"counts": {"a": 1}, "n": 2, "other": 3}, null, {}]}}']))
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
    decoded = JsonDecoder(pa.schema([("map", COUNTS)]), ["map"]).decode(lines_of([b'{"map": {}}', text.encode()]))
    assert decoded.refused.problems == [problem]
    assert decoded.batch.num_rows == 1


def test_a_key_cannot_write_what_follows_it() -> None:
    decoder = JsonDecoder(pa.schema([("map", pa.map_(pa.int64(), pa.int64()))]))
    decoded = decoder.decode(lines_of([rb'{"map": {"1, \"value\": 3}, {\"key\": 4": 5}}']))
    assert decoded.batch.num_rows == 0
    assert len(decoded.refused.problems) == 1
