"""The loops that tests run and break. Each scenario: its input, its body in row form, its builder.

Oracles are in ``loop_results.py``; nothing here is taken from ``examples/``, so that each checks the other.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

import headgate as hg
from crash.support.pacing import Paced
from crash.support.pipelines import Pipeline, make

Row = dict[str, Any]
Spec = dict[str, Any]
Body = tuple[hg.Stream, hg.Stream]

LAG_S = 0.01


def lagging(batch: pl.DataFrame) -> pl.DataFrame:
    """Keep the thread busy, so that records are under way when something is killed."""
    time.sleep(LAG_S)  # slow work: not a wait for anything
    return batch


def dealt(frame: pl.DataFrame, splits: int) -> list[pl.DataFrame]:
    """Deal the rows out to splits, like cards."""
    return [frame.gather_every(splits, offset) for offset in range(splits)]


def out(spec: Spec, stream: hg.Stream, name: str = "out") -> None:
    stream.sink(hg.FileSink(Path(spec["root"]) / name, "parquet", roll_interval=0), name=name)


# -- FLIP-16's own: 2n - n = n --------------------------------------------------------------------------------------

FLIP_KEYS = 40


def flip16_input(rows: int) -> pl.DataFrame:
    return pl.DataFrame({"id": range(rows)}).with_columns(key=(pl.col("id") * 7_919) % FLIP_KEYS)


class Counter(hg.ProcessFunction):
    """ADD raises the counter of its key by 2 and feeds one SUBTRACT back, which lowers it by 1 and comes out."""

    schema = {"id": pa.int64(), "key": pa.int64(), "what": pa.string(), "counter": pa.int64(), "events": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.counter = state.value("counter", pa.int64())
        self.events = state.value("events", pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        is_add = row["what"] == "add"
        counter = self.counter.get(0) + (2 if is_add else -1)
        events = self.events.get(0) + 1
        self.counter.put(counter)
        self.events.put(events)
        yield {**row, "what": "subtract" if is_add else "done", "counter": counter, "events": events}


def flip16_body(loop: hg.KeyedStream) -> Body:
    counted = loop.process(Counter(), name="counter")
    back = counted.filter(pl.col("what") == "subtract").map_batches(lagging)
    return back, counted.filter(pl.col("what") == "done")


def flip16_repartitioned(loop: hg.KeyedStream) -> Body:
    """The subtask that feeds a record back is not the one that it came from."""
    counted = loop.process(Counter(), name="counter")
    back = counted.filter(pl.col("what") == "subtract").rebalance().map_batches(lagging)
    return back, counted.filter(pl.col("what") == "done")


def flip16(spec: Spec) -> Pipeline:
    pipeline = make(spec)
    source = Paced.of(dealt(flip16_input(spec["rows"]), 4), spec["rate"], spec["root"])
    adds = pipeline.source(source).select(
        "id", "key", what=pl.lit("add"), counter=pl.lit(0, pl.Int64), events=pl.lit(0, pl.Int64)
    )
    body = flip16_repartitioned if spec.get("repartitioned") else flip16_body
    out(spec, adds.key_by("key").iterate(body, name="loop"))
    return pipeline


# -- Flink ML's: the sum of each round ------------------------------------------------------------------------------

ROUNDS = 5
PER_SOURCE = 1_000


class RaisesOnce:
    """Raises when it has seen so many records in one life, once for all lives."""

    def __init__(self, points: list[int], root: str) -> None:
        self.points, self.root, self.seen = points, root, 0

    def one_more(self) -> None:
        self.seen += 1
        if self.seen not in self.points:
            return
        with contextlib.suppress(FileExistsError):
            os.close(os.open(Path(self.root) / f"raised-{self.seen}", os.O_CREAT | os.O_EXCL))
            raise ValueError(f"has seen {self.seen} records")


class SumOfRound(hg.ProcessFunction):
    """Sums each round; at its end feeds the sum back once, which is then all that the next round has."""

    schema = {"key": pa.int64(), "value": pa.int64(), "what": pa.string(), "round": pa.int64()}

    def __init__(self, fault: RaisesOnce, on_round_s: float) -> None:
        self.fault, self.on_round_s = fault, on_round_s

    def open(self, state: hg.StateHandle) -> None:
        self.sums = state.map("sums", pa.int64(), pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row] | None:
        self.fault.one_more()
        self.sums.put(row["round"], self.sums.get(row["round"], 0) + row["value"])
        return None

    def on_round(self, round: int, context: hg.ProcessContext) -> Iterator[Row]:
        time.sleep(self.on_round_s)  # slow work: not a wait for anything
        yield {"key": context.key, "value": self.sums.get(round), "what": "sum", "round": round}


class SumAndPassOn(SumOfRound):
    """Sums each round; feeds every single record back, so that it must come round once in each."""

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        super().process(row, context)
        yield row


def rounds(spec: Spec) -> Pipeline:
    pipeline = make(spec)
    numbers = pl.DataFrame({"value": range(PER_SOURCE)})
    first, *others = (
        pipeline.source(Paced.of([numbers], spec["rate"] / 4, spec["root"]), name=f"source-{n}") for n in range(4)
    )
    values = first.union(*others).select(key=pl.lit(0, pl.Int64), value="value", what=pl.lit("record"))
    fault = RaisesOnce(spec.get("raises_at", []), spec["root"])
    function = (SumAndPassOn if spec.get("each_record") else SumOfRound)(fault, spec.get("on_round_s", 0.0))

    def body(loop: hg.KeyedStream) -> Body:
        summed = loop.process(function, name="sum")
        sums = summed.filter(pl.col("what") == "sum")
        return summed.filter(pl.col("what") == "record") if spec.get("each_record") else sums, sums

    looped = values.key_by("key").iterate(body, max_rounds=ROUNDS, round_column="round", name="loop")
    out(spec, looped.select("round", "value"))
    return pipeline


# -- connected components and shortest paths ------------------------------------------------------------------------


class SmallestLabel(hg.ProcessFunction):
    """A row with ``to`` is an edge of ``vertex``, one without is news of a label. Tells neighbours and the world."""

    schema = {"vertex": pa.int64(), "to": pa.int64(), "label": pa.int64(), "is_change": pa.bool_()}

    def open(self, state: hg.StateHandle) -> None:
        self.label = state.value("label", pa.int64())
        self.neighbours = state.list("neighbours", pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        vertex, before = context.key, self.label.get()
        label = min(row["label"], vertex if before is None else before)
        if before is None or label < before:
            self.label.put(label)
            yield {"vertex": vertex, "to": None, "label": label, "is_change": True}
            for neighbour in self.neighbours.get():
                yield {"vertex": neighbour, "to": None, "label": label, "is_change": False}
        if row["to"] is not None:
            self.neighbours.append(row["to"])
            yield {"vertex": row["to"], "to": None, "label": label, "is_change": False}


class ShortestPath(hg.ProcessFunction):
    """A row with ``to`` is an edge with its weight, one without says that ``vertex`` can be reached in ``distance``."""

    schema = {"vertex": pa.int64(), "to": pa.int64(), "distance": pa.float64(), "is_change": pa.bool_()}

    def open(self, state: hg.StateHandle) -> None:
        self.distance = state.value("distance", pa.float64())
        self.edges = state.map("edges", pa.int64(), pa.float64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        if row["to"] is not None:
            self.edges.put(row["to"], row["distance"])
            if self.distance.exists:
                yield self.news(row["to"], self.distance.get() + row["distance"])
            return
        before = self.distance.get()
        if before is None or row["distance"] < before:
            self.distance.put(row["distance"])
            yield {**self.news(context.key, row["distance"]), "is_change": True}
            for to, weight in self.edges.items():
                yield self.news(to, row["distance"] + weight)

    @staticmethod
    def news(vertex: int, distance: float) -> Row:
        return {"vertex": vertex, "to": None, "distance": distance, "is_change": False}


def graph(spec: Spec) -> Pipeline:
    """``spec["graph"]`` names a file that the test wrote: vertex, to, and what the algorithm wants of an edge."""
    pipeline = make(spec)
    function = {"components": SmallestLabel, "paths": ShortestPath}[spec["algorithm"]]()
    edges = pl.read_parquet(spec["graph"])
    source = Paced.of(dealt(edges, 4), spec["rate"], spec["root"])

    def body(loop: hg.KeyedStream) -> Body:
        told = loop.process(function, name="tell")
        news = told.filter(~pl.col("is_change")).map_batches(lagging)
        return news, told.filter(pl.col("is_change")).select("vertex", pl.col(edges.columns[2]))

    rows = pipeline.source(source).with_columns(is_change=pl.lit(False))
    out(spec, rows.key_by("vertex").iterate(body, name="loop"))
    return pipeline


# -- reachability with deletions ------------------------------------------------------------------------------------

NODES = 300
PARTS = 3


def reachability_events(count: int, seed: int, *, deletes: bool) -> list[Row]:
    """Sources and links come and, if wanted, go. A link that comes again has another id. Link ids are never 0."""
    dice = random.Random(seed)
    nodes = NODES if deletes else count  # few enough links that paths do not multiply without end
    few, many = nodes * 85 // 100, nodes * (110 if deletes else 70) // 100
    sources: set[int] = set()
    links: dict[tuple[int, int], int] = {}
    events: list[Row] = []
    while len(events) < count:
        kind = dice.random()
        if kind < 0.10:
            node = dice.randrange(nodes)
            if node not in sources:
                sources.add(node)
                events.append({"node": node, "what": "add-source", "link": 0, "to": node})
        elif kind < 0.14 and deletes and sources:
            node = dice.choice(sorted(sources))
            sources.remove(node)
            events.append({"node": node, "what": "delete-source", "link": 0, "to": node})
        elif kind < 0.55 or not deletes:
            node, to = dice.randrange(nodes), dice.randrange(nodes)
            if node != to and (node, to) not in links and len(links) < many:
                links[node, to] = len(events) + 1
                events.append({"node": node, "what": "add-link", "link": len(events) + 1, "to": to})
        elif len(links) > few:
            node, to = dice.choice(list(links))
            events.append({"node": node, "what": "delete-link", "link": links.pop((node, to)), "to": to})
    return events


class Reach(hg.ProcessFunction):
    """Every simple path from a source to a node, kept at the node: joined with its links, taken back when one goes.

    A path is text: the source and then "link>node" for each step, separated by blanks. A node sends what it knows of a
    path in order, and so does every channel: a path is taken back after it was told.
    """

    schema = {"node": pa.int64(), "what": pa.string(), "link": pa.int64(), "to": pa.int64(), "path": pa.string()}

    def open(self, state: hg.StateHandle) -> None:
        self.links = state.map("links", pa.int64(), pa.int64())
        self.paths = state.map("paths", pa.string(), pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        node, what = context.key, row["what"]
        if what in ("add-link", "delete-link"):
            if what == "add-link":
                self.links.put(row["link"], row["to"])
            else:
                self.links.remove(row["link"])
            told = "reached" if what == "add-link" else "lost"
            for path, _ in self.paths.items():
                yield from self.joined(told, path, row["link"], row["to"])
            return
        told = "reached" if what in ("add-source", "reached") else "lost"
        path = row["path"] or str(node)
        if told == "reached":
            self.paths.put(path, 1)
        else:
            self.paths.remove(path)
        yield {"node": node, "what": "changed", "link": 1 if told == "reached" else -1, "to": node, "path": path}
        for link, to in self.links.items():
            yield from self.joined(told, path, link, to)

    @staticmethod
    def joined(told: str, path: str, link: int, to: int) -> Iterator[Row]:
        passed = [step.rpartition(">")[2] for step in path.split(" ")]
        if str(to) not in passed:  # the cycle guard
            yield {"node": to, "what": told, "link": 0, "to": to, "path": f"{path} {link}>{to}"}


def reach_body(loop: hg.KeyedStream) -> Body:
    told = loop.process(Reach(), name="reach")
    changes = told.filter(pl.col("what") == "changed")
    return told.filter(pl.col("what") != "changed").map_batches(lagging), changes


def reachability(spec: Spec) -> Pipeline:
    pipeline = make(spec)
    events = pl.DataFrame(
        reachability_events(spec["rows"], spec["events_seed"], deletes=spec["deletes"]),
        schema={"node": pl.Int64, "what": pl.String, "link": pl.Int64, "to": pl.Int64},
    ).with_columns(path=pl.lit(None, pl.String))
    parts = [events.filter(pl.col("node") % PARTS == part) for part in range(PARTS)]  # the events of a node in order
    source = Paced.of(parts, spec["rate"], spec["root"])
    changes = pipeline.source(source).key_by("node").iterate(reach_body, name="loop")
    changed = changes.select("node", "path", change="link")
    out(spec, changed)
    return pipeline


# -- shapes ---------------------------------------------------------------------------------------------------------

TRIPS = 1 + (pl.col("id") * 7) % 11
"""How often a record goes round: a pure function of it."""


def trips_input(rows: int) -> pl.DataFrame:
    return pl.DataFrame({"id": range(rows)}).select("id", left=TRIPS, trips=pl.lit(0, pl.Int64))


def entering(spec: Spec, pipeline: Pipeline) -> hg.Stream:
    return pipeline.source(Paced.of(dealt(trips_input(spec["rows"]), 4), spec["rate"], spec["root"]))


def step(loop: hg.Stream) -> hg.Stream:
    return loop.with_columns(left=pl.col("left") - 1, trips=pl.col("trips") + 1)


def countdown(loop: hg.Stream) -> Body:
    stepped = step(loop).map_batches(lagging)
    return stepped.filter(pl.col("left") > 0).rebalance(), stepped.filter(pl.col("left") <= 0)


class Lag:
    """``lagging``, for longer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, batch: pl.DataFrame) -> pl.DataFrame:
        time.sleep(self.seconds)  # slow work: not a wait for anything
        return batch


def trips(spec: Spec) -> Pipeline:
    """A loop without a key: its log moves to other heads as it is."""
    pipeline = make(spec)

    def body(loop: hg.Stream) -> Body:
        stepped = step(loop).map_batches(Lag(spec.get("lag_s", LAG_S)))
        return stepped.filter(pl.col("left") > 0).rebalance(), stepped.filter(pl.col("left") <= 0)

    out(spec, entering(spec, pipeline).iterate(body, name="loop").select("id", "trips"))
    return pipeline


def spin(loop: hg.Stream) -> Body:
    stepped = loop.with_columns(inner=pl.col("inner") - 1, trips=pl.col("trips") + 1).map_batches(lagging)
    return stepped.filter(pl.col("inner") > 0).rebalance(), stepped.filter(pl.col("inner") <= 0)


def nest(loop: hg.Stream) -> Body:
    """Each trip of the outer loop makes ``left`` trips of the inner one."""
    inner = loop.with_columns(inner=pl.col("left")).iterate(spin, name="inner")
    done = inner.select("id", left=pl.col("left") - 1, trips=pl.col("trips"))
    return done.filter(pl.col("left") > 0).rebalance(), done.filter(pl.col("left") <= 0)


def nested(spec: Spec) -> Pipeline:
    """Two heads in one cycle."""
    pipeline = make(spec)
    out(spec, entering(spec, pipeline).iterate(nest, name="outer").select("id", "trips"))
    return pipeline


def side_by_side(spec: Spec) -> Pipeline:
    """Two loops behind one source, and a third behind one of them."""
    pipeline = make(spec)
    records = entering(spec, pipeline)
    out(spec, records.iterate(countdown, name="first").select("id", "trips"), "beside")
    again = records.iterate(countdown, name="second").with_columns(left=TRIPS, trips=pl.lit(0, pl.Int64))
    out(spec, again.iterate(countdown, name="third").select("id", "trips"), "behind")
    return pipeline


SHORT = 200


def short_input(first: int) -> pl.DataFrame:
    """Return records with ids of their own, which are there at once."""
    ids = pl.DataFrame({"id": range(first, first + SHORT)})
    return ids.select(id=-1 - pl.col("id"), left=TRIPS, trips=pl.lit(0, pl.Int64))


def outside(spec: Spec) -> Pipeline:
    """The operator in the body has an input from outside the loop; two sources end long before the third."""
    pipeline = make(spec)
    before = pipeline.source(Paced.of(dealt(short_input(0), 2), 1_000, ""), name="short")
    within = pipeline.source(Paced.of(dealt(short_input(SHORT), 2), 1_000, ""), name="short-within")

    def body(loop: hg.Stream) -> Body:
        stepped = step(loop.union(within).rebalance()).map_batches(lagging)
        return stepped.filter(pl.col("left") > 0).rebalance(), stepped.filter(pl.col("left") <= 0)

    out(spec, entering(spec, pipeline).union(before).iterate(body, name="loop").select("id", "trips"))
    return pipeline


def tenfold(row: Row) -> list[Row]:
    return [{"id": row["id"] * 10 + digit, "left": row["left"] - 1} for digit in range(10)]


def amplify(loop: hg.Stream) -> Body:
    more = loop.flat_map(tenfold)
    return more.filter(pl.col("left") > 0).rebalance(), more.filter(pl.col("left") <= 0)


def amplifying(spec: Spec) -> Pipeline:
    """Each record becomes a thousand in three trips."""
    pipeline = make(spec)
    records = entering(spec, pipeline).select("id", left=pl.lit(3, pl.Int64))
    out(spec, records.iterate(amplify, name="loop").select("id"))
    return pipeline


# -- what a checkpoint holds ----------------------------------------------------------------------------------------


class Remember(hg.ProcessFunction):
    """Keeps every record that it has seen; feeds back those that go on for ever."""

    def open(self, state: hg.StateHandle) -> None:
        self.text = state.value("text", pa.string())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        self.text.put(row["text"])
        yield row


def remember(spec: Spec) -> Pipeline:
    """``rows`` records in state, of which the first ``circulating`` never come to rest."""
    pipeline = make(spec)
    frame = pl.DataFrame({"id": range(spec["rows"])}).with_columns(text=pl.lit("x" * 100))
    source = Paced.of(dealt(frame, 4), spec["rate"], spec["root"])

    def body(loop: hg.KeyedStream) -> Body:
        kept = loop.process(Remember(), name="remember")
        return kept.filter(pl.col("id") < spec["circulating"]).map_batches(lagging), kept.filter(pl.col("id") < 0)

    out(spec, pipeline.source(source).key_by("id").iterate(body, name="loop"))
    return pipeline


BUILDERS = {
    "flip16": flip16,
    "rounds": rounds,
    "graph": graph,
    "reachability": reachability,
    "trips": trips,
    "nested": nested,
    "side_by_side": side_by_side,
    "outside": outside,
    "amplifying": amplifying,
    "remember": remember,
}
