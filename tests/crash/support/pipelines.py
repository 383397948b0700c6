"""The pipelines that tests run and break. Workers import this module; each builder takes the test's ``spec``."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
from tests.runtime.holding import held

import headgate as hg
from headgate.nexmark.events import Kind, Nexmark
from headgate.nexmark.queries import QUERIES, Tables

KEYS = 50
NEXMARK_TPS = 500
REDUCED_EVERY = 20
SESSION_GAP = "200ms"


SILENCE_MS = 20_000
"""Who is killed is noticed at once, by its connections; busy machines are not to be taken for dead ones."""

STOPPED_MS = 10_000
"""The same where a test stops somebody, and waits until that is noticed."""


class Pipeline(hg.Pipeline):
    """A pipeline that is patient, and may be told to write every snapshot to a file of its own.

    Its generators with a rate do not end before the file ``gate`` is there, if it is told of one; then they hurry.
    """

    spec: dict[str, Any] = {}

    def definition(self, parallelism: int | None = None):
        found = super().definition(parallelism)
        timeout_ms = self.spec.get("heartbeat_timeout_ms", SILENCE_MS)
        inline = self.spec.get("inline_bytes_max", found.config.checkpoints.inline_bytes_max)
        config = replace(
            found.config,
            runtime=replace(found.config.runtime, heartbeat_timeout_ms=timeout_ms, **self.spec.get("runtime", {})),
            checkpoints=replace(found.config.checkpoints, inline_bytes_max=inline),
        )
        found, gate = replace(found, config=config), self.spec.get("gate")
        return found if gate is None else held(found, Path(gate), hurries=True)


def make(spec: dict[str, Any], **options: Any) -> Pipeline:
    root = Path(spec["root"])
    checkpointing = hg.Checkpointing(
        interval=spec.get("interval", "200ms"),
        dir=spec.get("checkpoints", str(root / "checkpoints")),
        timeout=spec.get("timeout", "10m"),
        tolerable_failures=spec.get("tolerable_failures", 0),
    )
    options.setdefault("restart", hg.FixedDelay(delay="50ms"))
    options.setdefault("on_damaged_checkpoint", spec.get("on_damaged"))
    made = Pipeline(spec["name"], parallelism=spec.get("parallelism", 2), checkpointing=checkpointing, **options)
    made.spec = spec
    return made


def generator(rows: int, rate: float | None) -> hg.Generator:
    return hg.Generator(
        columns={"id": hg.RowNumber(), "key": hg.Uniform(0, KEYS), "value": hg.Uniform(0, 1_000)},
        rows=rows,
        rows_per_second=rate,
        time="deterministic",
        splits=4,
    )


def doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "twice": row["value"] * 2}


def counted(so_far: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {"key": so_far["key"], "n": so_far["n"] + row["n"]}


def rows_sink(spec: dict[str, Any]) -> Any:
    """The store, unless it must not matter: a stopped process may hold the lock of its catalogue."""
    root = Path(spec["root"])
    if spec.get("only_files"):
        return hg.FileSink(root / "rows", "parquet", roll_interval=0)
    return hg.StreamSink("out/rows", store=str(root / "store"))


def standard(spec: dict[str, Any]) -> Pipeline:
    """Three sinks of two kinds behind one source: a row function, a keyed window, a keyed reduce."""
    root = Path(spec["root"])
    pipeline = make(spec)
    source = pipeline.source(generator(spec["rows"], spec["rate"])).with_timestamps("ts")
    rows = source.map(doubled, {"id": pa.int64(), "twice": pa.int64()})
    rows.sink(rows_sink(spec), name="rows")
    windows = source.key_by("key").window(hg.Tumbling("5s")).agg(n=pl.len(), total=pl.col("value").sum())
    windows.sink(hg.FileSink(root / "windows", "parquet", roll_interval="300ms"), name="windows")
    thin = source.filter(pl.col("id") % REDUCED_EVERY == 0).select("key", n=pl.lit(1, pl.Int64))
    thin.key_by("key").reduce(counted).sink(hg.FileSink(root / "counts", roll_interval=0), name="counts")
    return pipeline


async def asked(row: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(row["id"] % 5 / 1_000)  # what a service takes: not a wait for anything
    return {"id": row["id"], "answer": row["value"] + 1}


def event_time(spec: dict[str, Any]) -> Pipeline:
    """Windows that overlap and merge, joins, a table that changes, and calls of a service, each into a sink."""
    pipeline = make(spec)
    source = pipeline.source(generator(spec["rows"], spec["rate"])).with_timestamps("ts")
    keyed = source.key_by("key")
    aggregates = {"n": pl.len(), "total": pl.col("value").sum()}
    odd, even = (source.filter(pl.col("id") % 20 == rest).select("id", "key", "ts") for rest in (1, 2))
    streams = {
        "sliding": keyed.window(hg.Sliding("5s", "1s")).agg(**aggregates),
        "sessions": keyed.window(hg.Session(SESSION_GAP)).agg(**aggregates),
        "medians": keyed.window(hg.Tumbling("5s")).agg(middle=pl.col("value").median()),
        "pairs": odd.join(even, on="key", how="full", within=(f"-{SESSION_GAP}", SESSION_GAP)).select(
            "id", other="id_right"
        ),
        "joined": odd.join(even.select("id", "key"), on="key", ttl=None).select("id", other="id_right"),
        "first": source.select("key", "value").key_by("key", "value").deduplicate(within=None),
        "table": keyed.agg(**aggregates, retractions=True),
        "asked": source.select("id", "value").map_async(asked, {"id": pa.int64(), "answer": pa.int64()}),
    }
    for name, stream in streams.items():
        stream.sink(hg.FileSink(Path(spec["root"]) / name, "parquet", roll_interval=0), name=name)
    return pipeline


def nexmark_events(spec: dict[str, Any]) -> Callable[[Kind], Nexmark]:
    """Return what makes the events of ``nexmark``."""
    return partial(Nexmark, events=spec["rows"], tps=NEXMARK_TPS, rows_per_second=spec["rate"], batch_rows=1_024)


def nexmark(spec: dict[str, Any]) -> Pipeline:
    """Every query of NEXMark, each into a stream of its own."""
    pipeline = make(spec)
    tables = Tables(pipeline, nexmark_events(spec))
    for name, asked in QUERIES.items():
        # one segment: changes of a row stay in order
        sink = hg.StreamSink(name, store=str(Path(spec["root"]) / "store"), segments=1)
        asked.build(tables).sink(sink, name=name)
    return pipeline


def stream_cuts(spec: dict[str, Any]) -> Pipeline:
    """A stream that is cut at one moment by each checkpoint, copied to files beside records of an ordinary source."""
    root = Path(spec["root"])
    pipeline = make(spec)
    source = pipeline.source(hg.StreamSource("in", store=str(root / "store"), stream_cuts=True), name="in")
    others = pipeline.source(generator(spec["rows"], spec["rate"]), name="others")
    both = source.select("id").union(others.select("id"))
    both.rebalance().sink(hg.FileSink(root / "copied", "parquet", roll_interval=0), name="copied")
    return pipeline


def group_source(spec: dict[str, Any]) -> Pipeline:
    """A stream that is read by a reader group, copied to files beside records of an ordinary source."""
    root = Path(spec["root"])
    pipeline = make(spec)
    source = pipeline.source(hg.GroupSource("in", "group", store=str(root / "store")), name="in")
    others = pipeline.source(generator(spec["rows"], spec["rate"]), name="others")
    both = source.select("id").union(others.select("id"))
    both.rebalance().sink(hg.FileSink(root / "copied", "parquet", roll_interval=0), name="copied")
    return pipeline


MANY_KEYS = 20_000


class Count(hg.ProcessFunction):
    """Counts the records of each key, in a value and in a map."""

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.by_half = state.map("by_half", pa.int64(), pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> list[dict[str, Any]]:
        half = row["id"] % 2
        self.count.put(self.count.get(0) + 1)
        self.by_half.put(half, self.by_half.get(half, 0) + 1)
        assert sum(n for _, n in self.by_half.items()) == self.count.get()
        return [{"id": row["id"], "key": row["key"], "n": self.count.get()}]


def many_keys(spec: dict[str, Any]) -> Pipeline:
    """A reduce and a process function with a state that is worth more than the records in flight."""
    root = Path(spec["root"])
    pipeline = make(spec)
    columns = {"id": hg.RowNumber(), "key": hg.Uniform(0, MANY_KEYS)}
    source = pipeline.source(
        hg.Generator(columns=columns, rows=spec["rows"], rows_per_second=spec["rate"], time="deterministic", splits=4),
        name="in",
    )
    ones = source.select("key", n=pl.lit(1, pl.Int64)).key_by("key").reduce(counted, name="reduced")
    ones.sink(hg.FileSink(root / "reduced"), name="reduced-out")
    counts = source.select("id", "key", n=pl.lit(1, pl.Int64)).key_by("key").process(Count(), name="processed")
    counts.sink(hg.FileSink(root / "processed"), name="processed-out")
    return pipeline


def slowly_counted(so_far: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.001)  # slow work: not a wait for anything
    return counted(so_far, row)


def backlog(spec: dict[str, Any]) -> Pipeline:
    """``standard``, except that every record passes a slow reduce: much is in flight behind the shuffle."""
    root = Path(spec["root"])
    pipeline = make(spec)
    source = pipeline.source(generator(spec["rows"], spec["rate"])).with_timestamps("ts")
    rows = source.map(doubled, {"id": pa.int64(), "twice": pa.int64()})
    rows.sink(rows_sink(spec), name="rows")
    windows = source.key_by("key").window(hg.Tumbling("5s")).agg(n=pl.len(), total=pl.col("value").sum())
    windows.sink(hg.FileSink(root / "windows", "parquet", roll_interval="300ms"), name="windows")
    ones = source.select("key", n=pl.lit(1, pl.Int64))
    ones.key_by("key").reduce(slowly_counted).sink(hg.FileSink(root / "counts", roll_interval=0), name="counts")
    return pipeline


def expected_standard(rows: int) -> dict[str, pl.DataFrame]:
    """Recount what ``standard`` must write, plainly."""
    return recounted(generated(rows), REDUCED_EVERY)


def generated(rows: int) -> pl.DataFrame:
    """Return the first ``rows`` records that the source delivers."""
    from headgate.connectors.base import SourceContext

    batches = []
    reader = generator(rows, None).open(SourceContext("p", "source", 0, 1, None))
    while not reader.is_finished():
        polled = reader.poll()
        if polled is not None:
            batches.append(polled.batch)
    return pl.from_arrow(pa.Table.from_batches(batches)).sort("id")


def recounted(events: pl.DataFrame, reduced_every: int) -> dict[str, pl.DataFrame]:
    """Return what the three sinks must hold after ``events``."""
    start = pl.col("ts").dt.truncate("5s")
    windows = events.group_by("key", window_start=start).agg(n=pl.len().cast(pl.Int64), total=pl.col("value").sum())
    thin = events.filter(pl.col("id") % reduced_every == 0)
    return {
        "rows": events.select("id", twice=pl.col("value") * 2),
        "windows": windows,
        "counts": thin.select("key", n=(pl.int_range(pl.len()) + 1).over("key").cast(pl.Int64)),
    }


def expected_event_time(rows: int) -> dict[str, pl.DataFrame]:
    """Recount what ``event_time`` must write, plainly; of the table that changes, how it ends."""
    events, gap = generated(rows), pl.duration(milliseconds=int(SESSION_GAP.removesuffix("ms")))
    aggregates = {"n": pl.len().cast(pl.Int64), "total": pl.col("value").sum()}
    starts = [pl.col("ts").dt.truncate("1s") - pl.duration(seconds=back) for back in range(5)]
    windows = events.with_columns(window_start=pl.concat_list(starts)).explode("window_start")
    is_new = (pl.col("ts").diff().over("key") >= gap).fill_null(True)
    sessions = events.sort("ts").with_columns(number=is_new.cum_sum().over("key"))
    sessions = sessions.group_by("key", "number").agg(window_start=pl.col("ts").min(), **aggregates).drop("number")
    tumbling = events.group_by("key", window_start=pl.col("ts").dt.truncate("5s"))
    odd, even = (events.filter(pl.col("id") % 20 == rest).select("id", "key", "ts") for rest in (1, 2))
    joined = odd.join(even, on="key")
    pairs = joined.filter((pl.col("ts_right") - pl.col("ts")).abs() <= gap).select("id", other="id_right")
    alone = pl.lit(None, pl.Int64)
    left, right = odd.join(pairs, on="id", how="anti"), even.join(pairs, left_on="id", right_on="other", how="anti")
    sides = [left.select("id", other=alone), right.select(alone.alias("id"), other="id")]
    return {
        "sliding": windows.group_by("key", "window_start").agg(**aggregates),
        "sessions": sessions,
        "medians": tumbling.agg(middle=pl.col("value").median()),
        "pairs": pl.concat([pairs, *sides]),
        "joined": joined.select("id", other="id_right"),
        "first": events.select("key", "value").unique(),
        "table": events.group_by("key").agg(**aggregates),
        "asked": events.select("id", answer=pl.col("value") + 1),
    }


class Doomed:
    """A row function that raises at one record."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == self.at:
            raise ValueError(f"cannot divide {row['id']}")
        return row


def failing(spec: dict[str, Any]) -> Pipeline:
    root = Path(spec["root"])
    pipeline = make(spec)
    source = pipeline.source(generator(spec["rows"], spec["rate"]))
    source.map(Doomed(spec["fails_at"]), name="divide").sink(hg.FileSink(root / "rows", roll_interval=0), name="rows")
    return pipeline


def only_even(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"] if row["id"] % 7 else f"seventh {row['id']}", "key": row["key"]}


def dead_letters(spec: dict[str, Any]) -> Pipeline:
    """Every seventh record does not fit the schema and is diverted; every eleventh has no key."""
    root = Path(spec["root"])
    store = str(root / "store")
    pipeline = make(spec, bad_records=hg.DeadLetter(hg.StreamSink("bad", store=store)))
    source = pipeline.source(generator(spec["rows"], spec["rate"]))
    types = {"id": pa.int64(), "key": pa.int64()}
    keyed = source.map(only_even, types, name="seventh").with_columns(
        key=pl.when(pl.col("id") % 11 == 0).then(None).otherwise(pl.col("key"))
    )
    counts = keyed.select("id", "key", n=pl.lit(1, pl.Int64)).key_by("key").reduce(first_id, name="last")
    counts.sink(hg.StreamSink("good", store=store), name="good")
    return pipeline


def first_id(so_far: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "n": so_far["n"] + 1}


def words(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"word": word} for word in row["line"].split()]


def slowly(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.001)  # slow work: not a wait for anything
    return row


def stream_to_stream(spec: dict[str, Any]) -> Pipeline:
    """Lines of a stream, split into words, into another stream."""
    store = str(Path(spec["root"]) / "store")
    pipeline = make(spec)
    lines = pipeline.source(hg.StreamSource("lines", store=store, follow=spec.get("follow", False)))
    if spec.get("slow"):
        lines = lines.map(slowly)
    lines.flat_map(words, {"word": pa.large_string()}).sink(hg.StreamSink("words", store=store), name="words")
    return pipeline


class Numbered(hg.ProcessFunction):
    """Numbers the events of each key: whatever was lost or came twice makes all numbers behind it wrong."""

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> list[dict[str, Any]]:
        self.count.put(self.count.get(0) + 1)
        return [{"key": row["key"], "value": row["value"], "number": self.count.get()}]


def between_shared_streams(spec: dict[str, Any]) -> Pipeline:
    """From one stream of a store that machines share to another one, with a state in between."""
    pipeline = make(spec)
    source = pipeline.source(hg.StreamSource("in", store=spec["store"]), name="in")
    numbered = (
        source.select("key", "value", number=pl.lit(0, pl.Int64)).key_by("key").process(Numbered(), name="numbered")
    )
    numbered.sink(hg.StreamSink("out", store=spec["store"], routing_key="key", segments=2), name="out")
    return pipeline


def hop(spec: dict[str, Any]) -> Pipeline:
    """One stream into another one, keys in order."""
    store = str(Path(spec["root"]) / "store")
    pipeline = make(spec)
    events = pipeline.source(hg.StreamSource(spec["from"], store=store))
    events.sink(hg.StreamSink(spec["to"], store=store, routing_key="key", segments=2), name="to")
    return pipeline


def text_files(spec: dict[str, Any]) -> Pipeline:
    root = Path(spec["root"])
    pipeline = make(spec)
    lines = pipeline.source(hg.TextFiles(str(root / "logs")))
    lines.map(slowly).select(pl.col(lines.columns[0]).alias("line")).sink(
        hg.FileSink(root / "copied", roll_interval=0), name="copied"
    )
    return pipeline


def held_up(frame: pl.DataFrame) -> pl.DataFrame:
    time.sleep(0.2)  # a paced source: not a wait for anything
    return frame


def listed_files(spec: dict[str, Any]) -> Pipeline:
    """A fixed list of files, read slowly unless told otherwise: a block of a file has about a hundred rows."""
    root = Path(spec["root"])
    pipeline = make(spec)
    rows = pipeline.source(hg.JsonLines(root / "in", {"file": pa.string(), "number": pa.int64()}))
    if spec.get("slow"):
        rows = rows.map_batches(held_up)
    rows.sink(hg.FileSink(root / "rows", "parquet", roll_interval=0), name="rows")
    return pipeline


def followed_files(spec: dict[str, Any]) -> Pipeline:
    """All files of some series of logs, followed for ever: a directory where logrotate works."""
    root = Path(spec["root"])
    pipeline = make(spec)
    lines = pipeline.source(hg.TextFiles(str(root / "logs"), follow=True, discovery_interval="50ms"))
    lines.sink(hg.StreamSink("lines", store=str(root / "store")), name="lines")
    return pipeline


def other_state(spec: dict[str, Any]) -> Pipeline:
    """``standard`` with another window: its state no longer fits."""
    root = Path(spec["root"])
    pipeline = make(spec)
    source = pipeline.source(generator(spec["rows"], spec["rate"])).with_timestamps("ts")
    rows = source.map(doubled, {"id": pa.int64(), "twice": pa.int64()})
    rows.sink(hg.StreamSink("out/rows", store=str(root / "store")), name="rows")
    windows = source.key_by("key").window(hg.Tumbling("7s")).agg(n=pl.len(), total=pl.col("value").sum())
    windows.sink(hg.FileSink(root / "windows", "parquet", roll_interval="300ms"), name="windows")
    thin = source.filter(pl.col("id") % REDUCED_EVERY == 0).select("key", n=pl.lit(1, pl.Int64))
    thin.key_by("key").reduce(counted).sink(hg.FileSink(root / "counts", roll_interval=0), name="counts")
    return pipeline


def with_length(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(length=pl.col("word").str.len_chars().cast(pl.Int64))


def twice(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**row, "word": row["word"] + mark} for mark in ".!"]


def is_long(row: dict[str, Any]) -> bool:
    return row["length"] > 4


def shout(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "word": row["word"].upper()}


def longest(so_far: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "n": so_far["n"] + 1}


WORDS = ["barrier", "key", "state", "sink", "window", "task"]


def every_operator(spec: dict[str, Any]) -> Pipeline:
    """Each verb once, between real workers."""
    root = Path(spec["root"])
    store = str(root / "store")
    pipeline = make(spec)
    first = [{"id": i, "word": WORDS[i % len(WORDS)]} for i in range(spec["rows"])]
    second = [{"id": -1 - i, "word": "late"} for i in range(spec["rows"])]
    left = pipeline.source(hg.FromRows(first, splits=3), name="left")
    right = pipeline.source(hg.FromRows(second, splits=2), name="right")
    merged = left.union(right).rebalance().map_batches(with_length)
    marked = merged.flat_map(twice).filter(is_long).map(shout)
    marked = marked.with_columns(even=pl.col("id") % 2 == 0).select("id", "word", "even", n=pl.lit(1, pl.Int64))
    marked.key_by("word").reduce(longest).sink(hg.StreamSink("reduced", store=store), name="reduced")
    small = left.filter(pl.col("id") < 10).broadcast().with_columns(copy=pl.lit(True))
    small.sink(hg.StreamSink("copies", store=store, segments=1), name="copies")
    return pipeline


class Published(hg.PublishOnCheckpoint):
    """Publishes the id of each row as a link that says which worker made it ready. Complains of a second one."""

    item_type = pa.struct({"id": pa.int64(), "by": pa.string()})

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def restore(self, context: hg.RestoreContext) -> None:
        super().restore(context)
        self.by = uuid.uuid4().hex
        self.seen = context.list("seen", int)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.ready({"id": row["id"], "by": self.by})
        self.seen.append(row["id"])
        return {"id": row["id"], "twice": row["value"] * 2}

    def publish(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            link = self.directory / str(item["id"])
            try:
                os.symlink(item["by"], link)
            except FileExistsError:
                if os.readlink(link) != item["by"]:
                    raise AssertionError(f"{link.name} was published before, and a restart took it back") from None


def publishing(spec: dict[str, Any]) -> Pipeline:
    """A function that publishes on completion, behind a shuffle."""
    root = Path(spec["root"])
    (root / "public").mkdir(exist_ok=True)
    pipeline = make(spec)
    rows = pipeline.source(generator(spec["rows"], spec["rate"])).rebalance()
    published = rows.map(Published(root / "public"), {"id": pa.int64(), "twice": pa.int64()}, name="publish")
    published.sink(hg.FileSink(root / "rows", "parquet", roll_interval=0), name="rows")
    return pipeline


def own_sinks(spec: dict[str, Any]) -> Pipeline:
    """The two sinks of the guide, in one database: even numbers are prepared there, odd ones come from a ledger."""
    from tests.support.sqlite_sinks import SqliteLedgerSink, SqliteSink

    path = str(Path(spec["root"]) / "numbers.db")
    pipeline = make(spec)
    rows = pipeline.source(generator(spec["rows"], spec["rate"]))
    numbers = rows.select(number="id", text=pl.col("id").cast(pl.String))
    numbers.filter(pl.col("number") % 2 == 0).sink(SqliteSink(path), name="even")
    numbers.filter(pl.col("number") % 2 == 1).sink(SqliteLedgerSink(path), name="odd")
    return pipeline


def processors(spec: dict[str, Any]) -> Pipeline:
    """See ``processor_pipeline``, which needs PySpark's classes."""
    from crash.support.processor_pipeline import processors

    return processors(spec)


def kafka(spec: dict[str, Any]) -> Pipeline:
    """A topic to a topic, with a count for each key in between; it ends when ``rows`` records were read."""
    pipeline = make(spec)
    ends = {("in", part): spec["rows"] // 2 for part in range(2)}
    schema = {"id": int, "key": int}
    source = pipeline.source(hg.Kafka(spec["brokers"], "in", format="json", schema=schema, end=ends), name="in")
    ones = source.with_columns(n=pl.lit(1, pl.Int64))
    counts = ones.key_by("key").process(Count(), name="counted").with_columns(text=pl.col("key").cast(pl.String))
    counts.sink(hg.KafkaSink(spec["brokers"], "out", key="text", compression="lz4"), name="out")
    return pipeline


def tables(spec: dict[str, Any]) -> Pipeline:
    """The changes of two tables of PostgreSQL: all of them appended to a log, and one table kept up to date."""
    pipeline, url = make(spec), spec["url"]
    changes = pipeline.source(hg.PostgresChanges(url, ["orders", "customers"]), name="in")
    changes.select("table", "op", "id", "n").sink(hg.PostgresSink(url, "log", commit="prepared"), name="log")
    orders = changes.filter(pl.col("table") == "public.orders").select("op", "id", "n")
    orders = orders.records_as_changes("id", retractions=True)
    orders.sink(hg.PostgresSink(url, "copied", upsert="id"), name="copied")
    return pipeline


BUILDERS = {
    "kafka": kafka,
    "tables": tables,
    "own_sinks": own_sinks,
    "processors": processors,
    "publishing": publishing,
    "listed-files": listed_files,
    "event_time": event_time,
    "nexmark": nexmark,
    "every_operator": every_operator,
    "standard": standard,
    "backlog": backlog,
    "many_keys": many_keys,
    "failing": failing,
    "dead_letters": dead_letters,
    "stream_cuts": stream_cuts,
    "group_source": group_source,
    "stream_to_stream": stream_to_stream,
    "between_shared_streams": between_shared_streams,
    "hop": hop,
    "text_files": text_files,
    "followed_files": followed_files,
    "other_state": other_state,
}
