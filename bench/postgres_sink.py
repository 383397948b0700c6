"""Rows per second that ``PostgresSink`` commits, appended and upserted, beside a bare COPY through ADBC.

The server is on this machine and waits for the disk. A commit reads the output of a checkpoint in pieces, as the driver
does; writing it to the checkpoint is not part of the time. Settings: ``rows`` of a checkpoint, ``repetitions``.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from adbc_driver_postgresql import dbapi

from bench.harness import Options, Result, at_least
from headgate.connectors.base import SinkContext
from headgate.connectors.postgres.sink import PostgresSink
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable, SnapshotPart
from headgate.protocol.checkpoints.commit import CommitPermit

NAME = "postgres_sink"

APPENDED_PER_S_MIN = 1_000_000
UPSERTED_PER_S_MIN = 200_000

BATCH_ROWS = 10_000
GENERATION = Generation(1)


def run(options: Options) -> Result:
    """Measure bare COPY, appends and upserts in turns."""
    from tests.servers.postgres import DURABLE, postgres_server

    rows = int(options.number("rows", 1_000_000, quick=100_000))
    repetitions = int(options.number("repetitions", 3, quick=1))
    found: dict[str, list[float]] = {
        "copied_per_s": [],
        "appended_per_s": [],
        "inserted_per_s": [],
        "upserted_per_s": [],
    }
    with postgres_server(settings=DURABLE) as server:
        url = server.url().partition("?")[0]
        for turn in range(repetitions):
            found["copied_per_s"].append(copied(url, rows, turn))
            found["appended_per_s"].append(committed(url, f"appended{turn}", rows, 1)[0])
            inserted, upserted = committed(url, f"upserted{turn}", rows, 2, upsert="id")
            found["inserted_per_s"].append(inserted)
            found["upserted_per_s"].append(upserted)
    figures: dict[str, Any] = {name: statistics.median(rates) for name, rates in found.items()}
    for name in ("appended", "inserted", "upserted"):
        figures[f"{name}_to_copied"] = figures[f"{name}_per_s"] / figures["copied_per_s"]
    figures["load_1m"] = os.getloadavg()[0]
    targets = {"appended_per_s": at_least(APPENDED_PER_S_MIN), "upserted_per_s": at_least(UPSERTED_PER_S_MIN)}
    return Result(figures, targets)


def records(rows: int) -> pa.RecordBatch:
    """Return records of an integer, a text, a float and a time."""
    numbers = np.arange(rows)
    texts = pa.array([f"text {number % 1_000}" for number in range(rows)], pa.large_string())
    columns = [pa.array(numbers), texts, pa.array(numbers / 7), pa.array(numbers, pa.timestamp("us"))]
    return pa.record_batch(columns, names=["id", "text", "share", "at"])


def copied(url: str, rows: int, turn: int) -> float:
    """Return the rate of COPY alone."""
    with psycopg.connect(url, autocommit=True) as database:
        database.execute(f"create table bare{turn} (id int8, text text, share float8, at timestamp)".encode())
    table = pa.Table.from_batches([records(rows)])
    with dbapi.connect(url) as connection, connection.cursor() as cursor:
        begin_s = time.perf_counter()
        cursor.adbc_ingest(f"bare{turn}", table.to_reader(BATCH_ROWS), mode="append")
        connection.commit()
        return rows / (time.perf_counter() - begin_s)


def committed(url: str, table: str, rows: int, checkpoints: int, **options: Any) -> list[float]:
    """Return the rate of each commit of the same records."""
    sink, batch = PostgresSink(url, table, create=True, **options), records(rows)
    sink.make_target(batch.schema)
    committer = sink.open_committer("bench", table, GENERATION)
    stored: dict[str, bytes] = {}
    committer.read_pieces_with(lambda piece: memoryview(stored[piece.path]))
    committer.recover(())
    rates = []
    for number in range(1, checkpoints + 1):
        one = written(sink, table, batch, CheckpointId(number), stored)
        begin_s = time.perf_counter()
        committer.commit(CommitPermit(CheckpointId(number), GENERATION), [one])
        rates.append(rows / (time.perf_counter() - begin_s))
    committer.close()
    return rates


def written(
    sink: PostgresSink, table: str, batch: pa.RecordBatch, checkpoint: CheckpointId, stored: dict[str, bytes]
) -> Committable:
    """Return the output of a checkpoint, whose pieces are stored in memory."""
    writer = sink.open(SinkContext("bench", table, 0, 1, GENERATION, batch.schema))
    for at in range(0, len(batch), BATCH_ROWS):
        writer.write(batch.slice(at, BATCH_ROWS))
    sealed = writer.seal(checkpoint)
    pieces = []
    for number in range(sealed.pieces_count):
        data = sealed.piece(number)
        part = SnapshotPart(len(data), 0, f"{table}-{checkpoint}-{number}")
        stored[part.path] = data
        pieces.append(part)
    payload = sealed.prepare()
    writer.close()
    assert payload is not None, "there are records"
    return replace(Committable(table, checkpoint, 0, GENERATION, payload), pieces=tuple(pieces))
