"""Tables of a real PostgreSQL server pass the conformance kit for sinks."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from tests.conftest import IS_DEEP

from headgate.connectors.postgres.sink import PostgresSink
from headgate.testing.sink_kit import check_sink
from headgate.testing.sinks.fake_pipeline import Target

Execute = Callable[[str], list[Any]]


@pytest.mark.deep
def test_it_passes_the_conformance_kit(url: str, execute: Execute) -> None:
    rescales, rows = (((1, 1), (1, 2), (3, 2)), (0, 1, 12)) if IS_DEEP else (((3, 2),), (1,))

    def fresh() -> Target:
        schema = f"s{uuid.uuid4().hex[:12]}"
        execute(f"create schema {schema}; create table {schema}.numbers (number int8, text text, at serial)")

        def read() -> list[dict[str, Any]]:
            rows = execute(f"select number, text from {schema}.numbers order by at")
            return [{"number": number, "text": text} for number, text in rows]

        return Target(PostgresSink(url, "numbers", schema=schema), read, is_ordered=True)

    check_sink(fresh, rescales=rescales, overlaps=(1, 3) if IS_DEEP else (1,), rows=rows)
