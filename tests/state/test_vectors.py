"""Vectors: what was put at positions is taken from there, whatever was put, frozen and tidied before."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.state import vectors
from headgate.state.vectors import HeapVector, Vector, make_vector

TEXT, LIST = pa.large_string(), pa.large_list(pa.int64())
ROW = pa.struct([("text", TEXT), ("number", pa.int64())])


def value(dtype: pa.DataType, dice: random.Random) -> Any:
    if dtype == TEXT:
        return "x" * dice.randrange(40)
    if dtype == LIST:
        return [dice.randrange(9) for _ in range(dice.randrange(4))]
    return (
        {"text": dice.choice([None, "a", "bcd"]), "number": dice.randrange(9)} if dtype == ROW else dice.randrange(99)
    )


@pytest.mark.parametrize("chunk_bytes", [1, 4_000, 1 << 26])
@pytest.mark.parametrize("dtype", [TEXT, LIST, ROW, pa.int64()], ids=str)
def test_values_are_where_they_were_put(dtype: pa.DataType, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "CHUNK_BYTES", chunk_bytes)
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
