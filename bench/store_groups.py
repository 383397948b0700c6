"""Reader groups and markers of a stream with many segments: open ones, and closed ones that nobody asks for any more.

A group whose two readers have everything commits, lives and is cut by checkpoints; a pipeline marks the stream and
looks at its frontier. Each verb is measured in one process, on SQLite's file and on tables in memory: the median of
its turns, in time of a processor, which does not count how long the disk syncs. The segments are put into the tables
directly: scaling a stream so often would take hours. Settings: ``open``, a list of numbers of open segments;
``closed``, how many there were before the four of the last case; ``turns``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness import Options, Result, at_most, median
from bench.store_history import ranges_of_history
from bench.stream_events import SCHEMA, STREAM
from headgate.protocol.store.layouts import KEY_SPACE, equal_ranges
from headgate.protocol.store.reader_group import (
    CheckpointAsked,
    CheckpointForgotten,
    Committed,
    GroupSegment,
    Joined,
    Lived,
    Passed,
)
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.records import GroupStart
from headgate.store.catalogue.sql import SqlCatalogue, memory_catalogue
from headgate.store.streams import StreamDefinition

NAME = "store_groups"

WHERE = ("file", "memory")
JUDGED = ("commit", "lived", "forget", "find", "mark", "frontier", "unmark")
"""Each is one call. What a checkpoint takes is that of three, and a whole cut names all that the stream ever had."""
OPEN = (10, 100, 1_000)
CLOSED = 10_000
MS_MAX = 20.0
"""What a verb of a group may take with 1,000 open segments, or with few of them behind a long history."""
FILLED = 1_000
"""Events in each segment; readers go on by one at a time."""
OWNER = "pipeline/source"
GROUP = "group"

Row = tuple[int, int, int, int, int | None]


def run(options: Options) -> Result:
    """Measure each case on both catalogues."""
    closed = int(options.number("closed", CLOSED, quick=200))
    turns = int(options.number("turns", 9, quick=3))
    sizes = options.numbers("open", OPEN[:1] if options.quick else OPEN)
    cases = {f"open_{size}": open_ones(size) for size in sizes}
    cases["history"] = [*ranges_of_history(closed)] if closed else []
    figures: dict[str, float] = {"closed": closed, "turns": turns}
    for where in WHERE:
        for case, rows in cases.items():
            if rows:
                with made(where, rows) as catalogue:
                    found = measured(catalogue, rows, turns)
                figures |= {f"{where}_{case}_{verb}_ms": median(taken) for verb, taken in found.items()}
    judged = [f"{where}_{case}_{verb}_ms" for where in WHERE for case in ("history", "open_1000") for verb in JUDGED]
    judged = [name for name in judged if name in figures]
    return Result(figures, {name: at_most(MS_MAX) for name in judged})


def open_ones(count: int) -> list[Row]:
    """Return the segments of a stream that was never scaled."""
    return [(number, *keys, 0, None) for number, keys in enumerate(equal_ranges((0, KEY_SPACE), count))]


@contextmanager
def made(where: str, rows: list[Row]) -> Iterator[SqlCatalogue]:
    """Give a catalogue with one stream of these segments, in which a group of two readers reads."""
    with TemporaryDirectory(prefix="headgate-bench-") as directory:
        path = Path(directory) / "catalogue.sqlite"
        catalogue = SqlCatalogue.open(path) if where == "file" else memory_catalogue("bench")
        catalogue.create_stream(StreamDefinition(STREAM, SCHEMA, 1, "key"), 1, if_not_exists=False)
        fill(catalogue, rows)
        catalogue.create_group(GROUP, [STREAM], GroupStart(from_latest=True), 1)
        fill(catalogue, rows, FILLED)
        for reader in "ab":
            catalogue.change_group(GROUP, Joined(reader, reader, 10_000))
        yield catalogue
        catalogue.close()


def fill(catalogue: SqlCatalogue, rows: list[Row], more: int = 0) -> None:
    """Give the stream these segments, with ``FILLED`` events in each, and ``more`` in those that are open."""
    keys = ("segment_id", "key_low", "key_high", "created_epoch", "closed_epoch")
    with catalogue._database.write() as connection:
        connection.execute(t.segments.delete())
        connection.execute(
            t.segments.insert(),
            [
                {"stream_id": 1, **dict(zip(keys, row, strict=True)), "end_position": FILLED + more * (row[4] is None)}
                for row in rows
            ],
        )
        present = sum(row[4] is None for row in rows)
        connection.execute(t.streams.update().values(layout_epoch=rows[-1][3], segments_count=present))


def measured(catalogue: SqlCatalogue, rows: list[Row], turns: int) -> dict[str, list[float]]:
    """Return how many ms of a processor each verb took in each turn."""
    open_numbers = [row[0] for row in rows if row[4] is None]
    found: dict[str, list[float]] = {}
    for turn in range(1, turns + 1):
        for name, verb in verbs(catalogue, open_numbers, turn).items():
            begun = time.thread_time()
            verb()
            found.setdefault(name, []).append((time.thread_time() - begun) * 1_000)
    return found


def verbs(catalogue: SqlCatalogue, open_numbers: list[int], turn: int) -> dict[str, Callable[[], object]]:
    """Return what is done in one turn: a commit of each reader, one of a single segment, a checkpoint, a mark."""
    at = {GroupSegment(STREAM, number): FILLED + 2 * turn for number in open_numbers}
    one = {GroupSegment(STREAM, open_numbers[0]): FILLED + 2 * turn + 1}

    def change(event: object) -> object:
        return catalogue.change_group(GROUP, event)  # type: ignore[arg-type]

    def checkpoint() -> None:
        change(CheckpointAsked(str(turn)))
        for reader in "ab":
            change(Passed(reader, reader, str(turn), one))

    return {
        "commit": lambda: change(Committed("a", "a", at)),
        "commit_one": lambda: [change(Committed(reader, reader, one)) for reader in "ab"],
        "lived": lambda: change(Lived("a", "a", turn)),
        "checkpoint": checkpoint,
        "forget": lambda: change(CheckpointForgotten(str(turn))),
        "find": lambda: catalogue.find_group(GROUP),
        "cut": lambda: catalogue.group_cuts(GROUP, None),
        "mark": lambda: catalogue.mark(STREAM, OWNER, 1, turn),
        "frontier": lambda: catalogue.frontier(STREAM, OWNER, 1, open_numbers),
        "unmark": lambda: catalogue.unmark(OWNER, 1, 0, turn),
    }
