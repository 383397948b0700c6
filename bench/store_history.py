"""A stream with a long history: 10,000 segments, 1,000,000 chunks. Opening, listing, describing, first reads.

The history is put into the tables directly: writing it would take hours and would be no part of what is measured. A
few segments at the beginning and the end have files. Each thing is done in a store that was just opened, by a process
that has it all imported; judged is the slowest of the turns. Settings: ``segments``, ``chunks``, ``turns``.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.harness import Options, Result, at_most
from bench.stream_events import STREAM, events, make_stream
from headgate.protocol.store.layouts import KEY_SPACE, equal_ranges
from headgate.store.store import Store

NAME = "store_history"

SECONDS_MAX = 1.0
PRESENT = 4
WITH_FILES = 8
"""So many segments at the beginning, and the last layouts, have files."""


def run(options: Options) -> Result:
    """Make the history and measure."""
    segments = int(options.number("segments", 10_000, quick=1_000))
    chunks = int(options.number("chunks", 1_000_000, quick=20_000))
    turns = int(options.number("turns", 5, quick=2))
    with TemporaryDirectory(prefix="headgate-bench-") as directory:
        root = Path(directory) / "store"
        made_s = timed(lambda: make_history(root, segments, chunks))
        found: dict[str, list[float]] = {}
        for _ in range(turns):
            for name, seconds in measured(root):
                found.setdefault(name, []).append(seconds)
    figures: dict[str, Any] = {"segments": segments, "chunks": chunks, "made_s": made_s}
    figures |= {f"{name}_s": max(taken) for name, taken in found.items()}
    judged = ("open", "list", "describe", "command_list", "command_describe", "first_read", "last_read", "latest_read")
    return Result(figures, {f"{name}_s": at_most(SECONDS_MAX) for name in judged})


def measured(root: Path) -> Iterator[tuple[str, float]]:
    """Yield what was done, and how long it took."""
    begun = time.perf_counter()
    with Store.open(root) as store:
        yield "open", time.perf_counter() - begun
        cut = store.tail(STREAM)
    verbs: dict[str, Callable[[Store], object]] = {
        "list": lambda store: store.list_streams(),
        "describe": lambda store: store.describe(STREAM),
        "first_read": lambda store: store.follow(STREAM).read(),
        "latest_read": lambda store: store.follow(STREAM, start="latest").read(),
        "last_read": lambda store: store.follow(STREAM, start=last_of(cut)).read(),
        "append": append,
        "split": split_and_merge,
        "cut_at_head": lambda store: store.truncate(store.head(STREAM)),
    }
    for name, verb in verbs.items():
        with Store.open(root) as store:
            yield name, timed(partial(verb, store))
    for command in ("list", "describe"):
        yield f"command_{command}", timed(partial(commanded, root, command))


def last_of(cut: Any) -> Any:
    """Return the cut one event before the end of the newest segments that have events."""
    newest = sorted(number for number, position in cut.positions.items() if position)[-PRESENT:]
    return replace(cut, positions={**cut.positions, **{n: cut.positions[n] - 1 for n in newest}})


def append(store: Store) -> None:
    """Append one event, and wait until it is durable."""
    with store.writer(STREAM, linger=None) as writer:
        writer.append(events(1))


def split_and_merge(store: Store) -> None:
    """Scale the stream twice."""
    (first, *_) = store.layout(STREAM).present
    new = store.split(STREAM, first.segment_id).present[:2]
    store.merge(STREAM, [segment.segment_id for segment in new])


def commanded(root: Path, command: str) -> None:
    """Have the command line print it."""
    from typer.testing import CliRunner

    from headgate.cli.streams import app

    arguments = [command, *([STREAM] if command == "describe" else []), "--store", str(root)]
    result = CliRunner().invoke(app, arguments)
    if result.exit_code:
        raise RuntimeError(f"'headgate streams {command}' failed: {result.output}")


def timed(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def make_history(root: Path, segments: int, chunks: int) -> None:
    """Make a store whose stream was scaled until it had so many segments, with so many chunks in them."""
    with Store.open(root) as store:
        make_stream(store, 1)
        append(store)
        stream_id = store.find(STREAM).stream_id
    (model,) = (root / "chunks").rglob("*.chunk")
    layouts = list(ranges_of_history(segments))
    with closing(sqlite3.connect(root / "catalogue.sqlite", isolation_level=None)) as tables:
        tables.execute("PRAGMA synchronous = OFF")
        tables.execute("BEGIN")
        size_bytes, offset, checksum = tables.execute("SELECT size_bytes, offset, checksum FROM parts").fetchone()
        for table in ("parts", "chunks", "segments"):
            tables.execute(f"DELETE FROM {table}")
        each = max(1, chunks // segments)
        insert = (
            "INSERT INTO segments (stream_id, segment_id, key_low, key_high, created_epoch, closed_epoch, end_position)"
        )
        tables.executemany(f"{insert} VALUES (?, ?, ?, ?, ?, ?, {each})", ((stream_id, *row) for row in layouts))
        tables.execute(
            "UPDATE streams SET layout_epoch = ?, segments_count = ?",
            (max(row[3] for row in layouts), sum(row[4] is None for row in layouts)),
        )
        file = f"'{stream_id}/appended/' || n || '.chunk'"
        tables.execute(
            f"""
            WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < ?)
            INSERT INTO chunks (id, stream_id, file, size_bytes) SELECT n + 1, {stream_id}, {file}, ? FROM numbers
            """,
            (each * len(layouts), model.stat().st_size),
        )
        tables.execute(
            f"""
            INSERT INTO parts (stream_id, segment_id, start, events_count, chunk_id, offset, size_bytes, checksum)
            SELECT {stream_id}, (id - 1) / {each}, (id - 1) % {each}, 1, id, ?, ?, ? FROM chunks ORDER BY id
            """,
            (offset, size_bytes, checksum),
        )
        tables.execute("COMMIT")
    numbers = [n for row in layouts if is_with_file(row, layouts) for n in range(row[0] * each, (row[0] + 1) * each)]
    for number in numbers:
        os.link(model, model.parent / f"{number}.chunk")
    model.unlink()


def is_with_file(row: tuple[Any, ...], layouts: list[tuple[Any, ...]]) -> bool:
    """Whether the chunks of a segment are there: of the first ones, and the last ones."""
    return bool(row[0] < WITH_FILES or row[0] >= len(layouts) - WITH_FILES)


def ranges_of_history(segments: int) -> Iterator[tuple[int, int, int, int, int | None]]:
    """Yield the segments of a stream that had 4 and 5 segments in turn: number, keys, and layouts."""
    number = epoch = 0
    while number < segments:
        count = PRESENT + epoch % 2
        is_last = number + count >= segments
        for low, high in equal_ranges((0, KEY_SPACE), count):
            yield number, low, high, epoch, None if is_last else epoch + 1
            number += 1
        epoch += 1
