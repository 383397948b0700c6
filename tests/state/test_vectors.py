"""Vectors: what was put at positions is taken from there, whatever was put, frozen and tidied before."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.state import heap
from headgate.state.vectors import HeapVector, ListVector, Vector, make_vector

TEXT, LIST = pa.large_string(), pa.large_list(pa.int64())
ROW = pa.struct([("text", TEXT), ("number", pa.int64())])
WIDE = pa.struct(
    [
        ("bytes", pa.large_binary()),
        ("flag", pa.bool_()),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("price", pa.decimal128(12, 3)),
        ("ratio", pa.float64()),
        ("list", LIST),
        ("row", ROW),
    ]
)
ROWS = pa.large_list(WIDE)


def value(dtype: pa.DataType, dice: random.Random) -> Any:
    if dtype == TEXT:
        return "x" * dice.randrange(40)
    if dtype == LIST:
        return [dice.randrange(9) for _ in range(dice.randrange(4))]
    if dtype == ROWS:
        return [value(WIDE, dice) for _ in range(dice.randrange(4))]
    if dtype == WIDE:
        filled = {
            "bytes": bytes(dice.randrange(256) for _ in range(dice.randrange(30))),
            "flag": dice.random() < 0.5,
            "at": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=dice.randrange(10**12)),
            "day": date(2026, 1, 1) + timedelta(days=dice.randrange(99)),
            "price": Decimal(dice.randrange(10**6)) / 1_000,
            "ratio": dice.random(),
            "list": value(LIST, dice),
            "row": value(ROW, dice),
        }
        return {name: dice.choice([one, one, None]) for name, one in filled.items()}
    return (
        {"text": dice.choice([None, "a", "bcd"]), "number": dice.randrange(9)} if dtype == ROW else dice.randrange(99)
    )


@pytest.mark.parametrize("chunk_bytes", [1, 4_000, 1 << 26])
@pytest.mark.parametrize("dtype", [TEXT, LIST, ROW, WIDE, ROWS, pa.int64()], ids=str)
def test_values_are_where_they_were_put(dtype: pa.DataType, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(heap, "_BLOCK_MAX", chunk_bytes)
    monkeypatch.setattr(heap, "_BYTES_MAX", 10 * chunk_bytes)
    dice = random.Random(f"{dtype} {chunk_bytes}")
    for vector in (make_vector(dtype), HeapVector(dtype)):
        if dtype == pa.int64() and isinstance(vector, HeapVector):
            continue
        kept: dict[int, Any] = {}
        frozen: list[tuple[Vector, dict[int, Any]]] = []
        for _ in range(120):
            places = dice.sample(range(300), dice.choice([1, 2, 60]))
            values = [value(dtype, dice) for _ in places]
            vector.put(np.array(places), pa.array(values, dtype), 300)
            kept |= dict(zip(places, values, strict=True))
            if dice.random() < 0.05:
                frozen.append((vector.freeze(300), dict(kept)))
            if dice.random() < 0.05:
                vector.tidy(np.array(sorted(kept)))
        for found, expected in [(vector, kept), *frozen]:
            places = dice.sample(sorted(expected), len(expected))
            valid = np.array([dice.random() < 0.9 for _ in places])
            taken = found.take(np.array(places), valid).to_pylist()
            assert taken == [expected[at] if is_there else None for at, is_there in zip(places, valid, strict=True)]
            assert found.take(np.array([], np.int64)).to_pylist() == []


def test_lists_take_over_structs_of_others_without_copying_them() -> None:
    vector = make_vector(pa.large_list(ROW))
    assert isinstance(vector, ListVector)
    first, second = {"text": "a" * 20, "number": 1}, {"text": None, "number": 2}
    vector.put(np.array([0, 2]), pa.array([[first, second], []], pa.large_list(ROW)), 3)
    frozen = vector.freeze(3)
    owners, rows = vector.rows(np.array([2, 0]))
    assert owners.tolist() == [1, 1]
    added = vector.added(pa.array([{"text": "b", "number": None}], ROW))
    vector.put_rows(np.array([0, 1]), np.array([2, 1]), (rows + added)[np.array([2, 0, 1])], 3)
    assert vector.take(np.array([0, 1, 2])).to_pylist() == [[{"text": "b", "number": None}, first], [second], []]
    assert rows.column("text").to_pylist() == ["a" * 20, None]
    assert frozen.take(np.array([0, 2])).to_pylist() == [[first, second], []]


def test_lists_give_up_what_none_has_any_more() -> None:
    vector = make_vector(pa.large_list(ROW))
    assert isinstance(vector, ListVector)
    for number in range(3_000):
        row = {"text": f"{number} {'x' * 30}", "number": number}
        vector.put(np.array([0, 1]), pa.array([[row, row], [row]], pa.large_list(ROW)), 2)
        if vector.has_garbage(2):
            vector.tidy(np.array([0, 1]))
    assert len(vector.rows(np.array([0, 1]))[1].heap) < 10_000
    assert vector.take(np.array([0, 1])).to_pylist() == [[row, row], [row]]


def test_a_few_rows_do_not_keep_the_batch_they_came_in() -> None:
    column = pa.array(["x" * 1_000] * 10_000, TEXT)
    vector = HeapVector(TEXT)
    before = pa.total_allocated_bytes()
    vector.put(np.array([0]), column.slice(5, 1), 1)
    del column
    assert pa.total_allocated_bytes() < before
    assert vector.take(np.array([0])).to_pylist() == ["x" * 1_000]


@pytest.mark.parametrize("dtype", [TEXT, pa.large_binary()], ids=str)
def test_texts_of_a_column_of_more_than_two_gigabytes(dtype: pa.DataType, tmp_path: Path) -> None:
    """Such as those of a large state, read from a checkpoint. The file has holes: nothing of it is on the disk."""
    path, size = tmp_path / "texts", 3 << 30
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size - 50)
        file.write(b"a" * 20 + b"b" * 30)
    ends = np.array([0, 100, size - 50, size - 30, size], np.int64)
    with pa.memory_map(str(path)) as file:
        column = pa.Array.from_buffers(dtype, 4, [None, pa.py_buffer(ends), file.read_buffer(size)])
        vector = make_vector(dtype)
        vector.put(np.array([0, 1]), column[2:], 3)
        vector.put(np.array([2]), column[:1], 3)
        found = [value.as_buffer().to_pybytes() for value in vector.take(np.arange(3))]
    assert found == [b"a" * 20, b"b" * 30, b"\0" * 100]


@pytest.mark.parametrize("dtype", [ROW, pa.struct([("row", ROW)])], ids=str)
def test_structs_that_were_given_up_can_be_asked_for(dtype: pa.DataType) -> None:
    row: Any = {"text": "a" * 20, "number": 1}
    some = row if dtype == ROW else {"row": row}
    vector = make_vector(dtype)
    vector.put(np.arange(20), pa.array([some] * 20, dtype), 20)
    if dtype != ROW:
        vector.put(np.array([7]), pa.array([{"row": None}], dtype), 20)
    vector.tidy(np.array([7]))
    is_there = np.arange(20) == 7
    expected = some if dtype == ROW else {"row": None}
    assert vector.take(np.arange(20), is_there).to_pylist() == [expected if there else None for there in is_there]
