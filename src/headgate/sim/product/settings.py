"""What a seed draws for one run: the pipeline, perhaps a random graph, its input, its settings.

Graphs have chains, shuffles, fan-in and fan-out, state, windows, loops nested and side by side, and several sinks. A
``Net`` is a graph in which nothing goes round; the body of a ``Loop`` is one, too, and a loop is a step of another.
Nets are built with the public API and, from the same description, evaluated in plain Python (``records``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Protocol

import polars as pl

import headgate as hg
from headgate.connectors.base import Sink
from headgate.dataclass import dataclass
from headgate.model.config import Duration, MemoryState, StartConfig, StateConfig
from headgate.sim.product import steps as plain
from headgate.sim.product.checkpoint_publication import Outside
from headgate.sim.product.source import FileInputs, Pace
from headgate.sim.product.steps import (
    Count,
    Everywhere,
    Map,
    Picky,
    Plain,
    Record,
    Records,
    RoundSum,
    Step,
    Tally,
    Tallying,
    Window,
)
from headgate.sim.product.workloads import WORKLOADS, Branches, Job, Splits, Values, draw_splits

COLUMNS = ("k", "n", "v", "t", "left")
NESTED_MAX = 2


@dataclass(frozen=True, slots=True)
class Placed:
    """A step in a net. ``inputs`` are places of others, or of the net's own inputs; several are united."""

    name: str
    step: Step
    inputs: tuple[int, ...]
    is_rebalanced: bool = False


@dataclass(frozen=True, slots=True)
class Net:
    """Steps in an order in which each comes after its inputs. ``ends`` are the places that no process in it reads."""

    inputs_count: int
    placed: tuple[Placed, ...]
    ends: tuple[int, ...]

    def build(self, inputs: Sequence[hg.Stream]) -> list[hg.Stream]:
        """Add all steps; return the streams by place."""
        streams = list(inputs)
        for placed in self.placed:
            stream = united(streams, placed.inputs)
            streams.append(placed.step.build(stream.rebalance() if placed.is_rebalanced else stream, placed.name))
        return streams


class PlainNet:
    """What a net makes of records."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._steps = [placed.step.plain() for placed in net.placed]
        self.letters: Counter[tuple[str]] = Counter()
        """How many records each step refused."""

    def feed(self, inputs: Sequence[Records], *, ends: bool = False) -> list[Records]:
        """Return what comes to each place; ``ends``: there will be no more input."""
        made = list(inputs)
        for placed, step in zip(self._net.placed, self._steps, strict=True):
            given: Records = sum((made[place] for place in placed.inputs), Counter())
            found = step.feed(given)
            if isinstance(placed.step, Picky) and given != found:
                self.letters[placed.name,] += given.total() - found.total()
            made.append(found + step.finish() if ends else found)
        return made


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop around ``body``, with ends that are united and then go round again, or out.

    Attributes:
        body: reads the loop's records.
        modulus: decides which records go round (``records.goes_again``).
        is_keyed: records are always where their key belongs, and are tallied there.
        feedback_count: streams that go back, 1 or 2.
        has_rounds: it counts them, and drops what comes back for the ``rounds_max``-th time (None: nothing).
        on_round: called with each round that has ended everywhere.
    """

    body: Net
    modulus: int
    is_keyed: bool = False
    feedback_count: int = 1
    has_rounds: bool = False
    rounds_max: int | None = None
    on_round: Callable[[int], None] | None = field(default=None, compare=False)

    def build(self, stream: hg.Stream, name: str) -> hg.Stream:

        def body(loop: hg.Stream | hg.KeyedStream) -> tuple[list[hg.Stream], hg.Stream]:
            first = loop if isinstance(loop, hg.Stream) else loop.process(Tallying(), name=f"{name}-in")
            end = united(self.body.build([first]), self.body.ends)
            goes = (pl.col("left") > 0) & ((pl.col("n") * 7 + pl.col("v")) % self.modulus != 0)
            parts = [goes] if self.feedback_count == 1 else [goes & (pl.col("v") % 2 == i) for i in range(2)]
            again = [
                end.filter(part, name=f"{name}-again{i}").with_columns(left=pl.col("left") - 1, name=f"{name}-trip{i}")
                for i, part in enumerate(parts)
            ]
            return again, end.filter(~goes, name=f"{name}-out")

        options: dict[str, object] = {"name": name}
        if self.has_rounds:
            options |= {"max_rounds": self.rounds_max, "round_column": "round", "on_round": self.on_round}
        into = stream.key_by("k", name=f"{name}-by") if self.is_keyed else stream
        out: hg.Stream = into.iterate(body, **options)  # type: ignore[arg-type]
        return out.select(*COLUMNS, name=f"{name}-done") if self.has_rounds else out

    def plain(self) -> Plain:
        return _PlainLoop(self)


class _PlainLoop(Plain):
    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._body = PlainNet(loop.body)
        self._tally = Tally().plain() if loop.is_keyed else None

    def feed(self, records: Records) -> Records:
        return self._circle(records)

    def finish(self) -> Records:
        out, again = self._parted(self._body.feed([Counter()], ends=True))
        return out + self._circle(again)

    def _circle(self, records: Records) -> Records:
        out: Records = Counter()
        while records:
            first = records if self._tally is None else self._tally.feed(records)
            gone, records = self._parted(self._body.feed([first]))
            out += gone
        return out

    def _parted(self, made: Sequence[Records]) -> tuple[Records, Records]:
        """Return what leaves, and what comes back."""
        loop = self._loop
        out: Records = Counter()
        again: Records = Counter()
        for record, times in sum((made[place] for place in loop.body.ends), Counter[Record]()).items():
            if not plain.goes_again(record, loop.modulus):
                out[record._replace(round=0) if loop.has_rounds else record] += times
            elif loop.rounds_max is None or record.round + 1 < loop.rounds_max:
                again[record._replace(left=record.left - 1, round=record.round + loop.has_rounds)] += times
        return out, again


def united(streams: Sequence[hg.Stream], places: Sequence[int]) -> hg.Stream:
    """Return one stream of those at ``places``."""
    first, *others = (streams[place] for place in places)
    return first.union(*others) if others else first


class Drawing:
    """Draws nets."""

    def __init__(self, rng: random.Random, on_round: Callable[[str, int], None], *, grows: bool) -> None:
        """``grows``: there may be more input after what looked like the end, so nothing is summed up before a sink."""
        self._rng = rng
        self._on_round = on_round
        self._grows = grows
        self._names = 0

    def net(self, inputs_count: int) -> Net:
        """Return the net of a whole pipeline."""
        rng = self._rng
        placed: list[Placed] = []
        for _ in range(rng.choice((1, 2, 3, 4))):
            draws: list[Callable[[], Step]] = [self._step, self._step, self._counting]
            if not self._grows:
                draws += [self._window, lambda: self._loop(1)]
            step = rng.choice(draws)()
            is_early = isinstance(step, Window) and step.is_early
            places = range(inputs_count if is_early else inputs_count + len(placed))
            count = 1 if is_early else min(rng.choice((1, 1, 1, 2)), len(places))
            inputs = tuple(sorted(rng.sample(places, count)))
            placed.append(self._placed(step, inputs, rng.random() < 0.3 and not is_early))
        used = {place for one in placed for place in one.inputs}
        if self._grows and rng.random() < 0.6:
            placed.append(self._placed(Window(), (inputs_count + len(placed) - 1,), False))
            used.add(inputs_count + len(placed) - 2)
        return Net(inputs_count, tuple(placed), tuple(p for p in range(inputs_count + len(placed)) if p not in used))

    def _placed(self, step: Step, inputs: tuple[int, ...], is_rebalanced: bool) -> Placed:
        self._names += 1
        return Placed(f"{type(step).__name__.lower()}{self._names}", step, inputs, is_rebalanced)

    def _step(self) -> Step:
        rng = self._rng
        draws: list[Callable[[], Step]] = [
            lambda: Map("map", rng.choice(("row", "expression", "batch")), rng.randrange(100)),
            lambda: Map("filter", rng.choice(("row", "expression"))),
            lambda: Map("split", "row"),
            lambda: Map("rekey", rng.choice(("row", "expression", "batch"))),
            Tally,
        ]
        return rng.choice(draws)()

    def _counting(self) -> Step:
        rng = self._rng
        parts = rng.choice((1, 2))
        return rng.choice((Count("row", parts), Count("batch", parts), Count("reduce"), Everywhere(), Picky()))

    def _window(self) -> Step:
        is_early = self._rng.random() < 0.6
        return Window(is_early, None if is_early else self._rng.choice((None, 15)))

    def _loop(self, depth: int) -> Step:
        """Return a loop; deeper ones are plainer, because rounds belong to outermost loops."""
        rng = self._rng
        has_rounds = depth == 1 and rng.random() < 0.4
        placed: list[Placed] = []
        if has_rounds and rng.random() < 0.7:
            placed.append(self._placed(RoundSum(), (0,), False))
        for _ in range(rng.choice((0, 1, 2))):
            is_loop = depth < NESTED_MAX and rng.random() < 0.3
            step = self._loop(depth + 1) if is_loop else self._step()
            inputs = (
                (len(placed),) if rng.random() < 0.7 or (placed[:1] and isinstance(placed[0].step, RoundSum)) else (0,)
            )
            placed.append(self._placed(step, inputs, rng.random() < 0.3))
        if not has_rounds and depth == 1 and rng.random() < 0.3:
            placed.append(self._placed(Window(), (len(placed),), False))
        used = {place for one in placed for place in one.inputs}
        body = Net(1, tuple(placed), tuple(p for p in range(1 + len(placed)) if p not in used))
        name = f"loop{self._names + 1}"
        return Loop(
            body,
            modulus=rng.choice((3, 4, 50)),
            is_keyed=rng.random() < 0.5,
            feedback_count=rng.choice((1, 1, 2)),
            has_rounds=has_rounds,
            rounds_max=rng.choice((None, 1, 2, 3)) if has_rounds else None,
            on_round=(lambda number: self._on_round(name, number)) if has_rounds else None,
        )


@dataclass(frozen=True, slots=True)
class Graph:
    """A whole pipeline: a net after the sources, and the places that each sink reads."""

    net: Net
    sinks: dict[str, tuple[int, ...]]
    is_picky: bool
    rising: frozenset[str] = frozenset()

    def build(self, sources: Sequence[hg.Stream], sink_to: Callable[[str], Sink]) -> None:
        """Add everything after ``sources``."""
        streams = self.net.build(sources)
        for name, places in self.sinks.items():
            united(streams, places).sink(sink_to(name), name=name)

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """The columns of each sink that are compared."""
        found: dict[str, tuple[str, ...]] = dict.fromkeys(self.sinks, COLUMNS)
        if self.is_picky:
            found["bad-records"] = ("node",)
        return found

    def expected(self, inputs: Sequence[Sequence[plain.Row]]) -> dict[str, Counter[tuple[object, ...]]]:
        """Return what each sink must have at the end."""
        net = PlainNet(self.net)
        made = net.feed([Counter(Record(**row) for row in rows) for rows in inputs], ends=True)
        found: dict[str, Counter[tuple[object, ...]]] = {}
        for name, places in self.sinks.items():
            all_records: Records = sum((made[place] for place in places), Counter())
            found[name] = Counter({record[:-1]: times for record, times in all_records.items()})
        if self.is_picky:
            found["bad-records"] = Counter(dict(net.letters.items()))
        return found


def draw_graph(
    rng: random.Random, sources_count: int, on_round: Callable[[str, int], None], *, grows: bool = False
) -> Graph:
    """Return a random graph over ``sources_count`` sources."""
    net = Drawing(rng, on_round, grows=grows).net(sources_count)
    places = list(range(sources_count + len(net.placed)))
    if grows:
        places = [p for p in places if p in net.ends or p < sources_count]
    sinks: dict[str, tuple[int, ...]] = {}
    ends = list(net.ends)
    count = min(rng.choice((1, 1, 2, 3)), len(ends))
    for index in range(count):
        mine = ends[index::count]
        also = [rng.choice(places)] if rng.random() < 0.2 else []
        sinks[f"out{index}"] = tuple(sorted({*mine, *also}))
    return Graph(net, sinks, any(isinstance(placed.step, Picky) for placed in net.placed))


CHECKPOINTS = "checkpoints"
ROOT = f"sim://{CHECKPOINTS}"
NAME = "p"
ROLL_INTERVALS: tuple[Duration, ...] = (0, 0, "100ms", "1m")


class Judge(Protocol):
    """What of a sink's records is allowed."""

    def problem(self, sink: str, found: Counter[Values], wanted: Counter[Values], *, has_failed: bool) -> str | None:
        """Return what is wrong, or None."""


class Exactly:
    """Each record once."""

    def problem(self, sink: str, found: Counter[Values], wanted: Counter[Values], *, has_failed: bool) -> str | None:
        lost, more = sorted(wanted - found), sorted(found - wanted)
        return None if found == wanted else f"lost {len(lost)} {lost[:4]}, has {len(more)} more {more[:4]}"


@dataclass
class Settings:
    """One pipeline and how it is run.

    Attributes:
        job: what it does.
        inputs: by source, then split.
        hidden: splits that no process lists yet.
        grows: whether there were any.
        parallelism: of the next start.
        attempts: of Spark's own, per stage.
        judge: says whether what was committed is right.
        credit_bytes: bytes that may be unread on one channel; None: the usual.
    """

    job: Job
    inputs: list[Splits]
    hidden: set[str]
    grows: bool
    parallelism: int
    attempts: int
    pace: Pace
    checkpointing: hg.Checkpointing
    restart: hg.NoRestart | hg.FixedDelay | hg.ExponentialDelay | hg.FailureRate
    on_damaged: str | None
    roll_interval: Duration
    inline_bytes_max: int
    loop_memory_bytes: int
    max_drift: Duration | None = None
    """Splits of sources wait for none: sources of users' programs take no part."""
    files: FileInputs | None = None
    """Where the input is; None: the sources have it themselves."""
    outside: Outside | None = None
    """What functions publish to; None: nothing is published."""
    judge: Judge = field(default_factory=Exactly)
    credit_bytes: int | None = None
    start: StartConfig = field(default_factory=StartConfig)
    """What every start names."""
    state: StateConfig = field(default_factory=MemoryState)

    def listed(self) -> list[Splits]:
        """Return what sources list now."""
        return self._shown() if self.files is None else self.files.present(self._shown())

    def use_files(self, files: FileInputs) -> None:
        """Have the sources read files; each has one from the beginning."""
        self.files = files
        for splits in self.inputs:
            self.hidden.discard(min(splits))

    def fix_input(self) -> None:
        """Have all input be listed from the beginning."""
        self.hidden.clear()
        self.grows = False

    def update_files(self) -> None:
        """No process runs the pipeline: something may happen to the input."""
        if self.files is not None:
            self.files.update(self._shown(), grows=self.grows)

    def _shown(self) -> list[Splits]:
        return [{name: rows for name, rows in splits.items() if name not in self.hidden} for splits in self.inputs]

    def pack(self) -> None:
        """Have much input come in larger batches, and as slowly: a run of it takes less time."""
        rows_count = sum(len(rows) for splits in self.inputs for rows in splits.values())
        times = 4 if rows_count > 240 else 2 if rows_count > 120 else 1
        self.pace = replace(self.pace, batch_rows=self.pace.batch_rows * times, pause_ms=self.pace.pause_ms * times)


def draw_settings(rng: random.Random, on_round: Callable[[str, int], None]) -> Settings:
    """Return the settings of a run."""
    is_graph = rng.random() < 0.6
    grows = is_graph and rng.random() < 0.2
    sources_count = rng.choice((1, 1, 2)) if is_graph else 1
    splits_count = rng.choice((2, 3, 4)) if grows else rng.choice((1, 2, 3))
    rows_count = rng.choice((1, 40, 120, 240, 400)) // sources_count
    inputs = [draw_splits(rng, i, splits_count, rows_count) for i in range(sources_count)]
    if sources_count == 1 and is_graph and not grows and rng.random() < 0.2:
        inputs.append({"s1-quiet": []})  # delivers nothing, and ends late
    job: Job
    if is_graph:
        job = draw_graph(rng, len(inputs), on_round, grows=grows)
    else:
        job = Branches(tuple(rng.sample(WORKLOADS, rng.choice((1, 1, 2, 3)))))
    names = [name for splits in inputs for name in splits]
    return Settings(
        job,
        inputs,
        hidden=set(rng.sample(names, rng.randint(1, len(names)))) if grows else set(),
        grows=grows,
        parallelism=rng.choice((1, 2, 2, 3)),
        attempts=rng.choice((1, 1, 2)),
        pace=Pace(rng.choice((2, 4, 8)), rng.choice((5, 10, 20)), idle_ms=rng.choice((100, 500))),
        checkpointing=hg.Checkpointing(
            interval=f"{rng.choice((10, 20, 40, 80))}ms",
            dir=ROOT,
            timeout=f"{rng.choice((500, 1_000, 3_000))}ms",
            tolerable_failures=rng.choice((0, 2, 5)),
            retained=rng.choice((1, 2, 3)),
            max_concurrent=rng.choice((1, 1, 2)),
        ),
        restart=rng.choice(
            (
                hg.FixedDelay(delay="20ms"),
                hg.FixedDelay(attempts=2, delay="20ms"),
                hg.ExponentialDelay(initial="10ms", maximum="1s", reset_after="500ms"),
                hg.FailureRate(failures=3, interval="2s", delay="20ms"),
            )
        ),
        on_damaged=rng.choice((None, "previous")),
        roll_interval=rng.choice(ROLL_INTERVALS),
        inline_bytes_max=rng.choice((0, 0, 1_000, 20_000)),
        loop_memory_bytes=rng.choice((64 << 20, 4_000, 400)),
    )
