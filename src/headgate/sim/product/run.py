"""One run of the product: a pipeline of the public API and its user, faults, then healed, and a verdict.

The user starts the pipeline, starts it again whenever it ends before all input is processed, perhaps at another
parallelism, and sometimes stops it, drains it, cancels it, or starts it a second time beside itself. Users do what
errors say: by their remedies, never by their words. A seed decides everything.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import headgate as hg
from headgate.connectors.base import Sink, Source
from headgate.connectors.files.file_committer import committed_files
from headgate.dataclass import dataclass
from headgate.errors import HeadgateError, PipelineFailed
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Committable, Manifest
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import Continuation, Progress, RunResult
from headgate.runtime.driver.driver import Driver
from headgate.runtime.wire.spill import SpillBudget
from headgate.sim.machine.storage import Disk, SimStorage
from headgate.sim.machine.surroundings import Network, SimSurroundings
from headgate.sim.machine.tasks import SimProcess, Tasks
from headgate.sim.machine.world import Bound, Fault, Faults, Violation, World, replaced
from headgate.sim.product import verdict as verdict_module
from headgate.sim.product.checkpoint_publication import Outside
from headgate.sim.product.fault_injection import (
    LASTS_MS,
    FaultInjector,
    Started,
    StorageDamage,
    draw_focus,
    put_in_focus,
)
from headgate.sim.product.history import History, files_of
from headgate.sim.product.settings import CHECKPOINTS, NAME, Exactly, draw_settings
from headgate.sim.product.source import FileInputs, PacedSplits
from headgate.sim.product.spark import FINGERPRINT, SimSpark
from headgate.sim.product.verdict import StoredStates, Verdict
from headgate.sim.product.workloads import Splits, with_typed
from headgate.storage import urls

EVENTS_MAX = 400_000
"""Of both phases; reaching it is a hang. Usual runs need a hundredth."""

DRIVERS_MAX = 60
DRIVERS_AFTER_HEAL_MAX = 6
"""Drivers that may end without success when nothing fails any more, beside those that one of them replaced."""

LATE_MS = 1_000
"""When nothing fails any more, what was put before and lands late has landed after so much virtual time."""

_BUG = re.compile(r"\b(Assertion|Attribute|Index|Key|Type|Value|ZeroDivision)Error\b|ProtocolViolation")
"""What no user should ever read."""


@dataclass(frozen=True, slots=True)
class Result:
    """Verdict of one run."""

    seed: int
    violation: Violation | None
    digest: str
    events_count: int
    virtual_ms: int
    story: tuple[str, ...]


class Watcher:
    """Hears what users hear."""

    def __init__(self, run: Run, started: Started) -> None:
        self._run = run
        self._started = started

    def on_progress(self, progress: Progress) -> None:
        """Numbers are not part of the story."""

    def on_restart(self, reason: str, delay_ms: int) -> None:
        self._tell(f"restarts in {delay_ms} ms: {reason}")

    def on_note(self, text: str) -> None:
        self._tell(text)
        if isinstance(text, Continuation):
            self._started.restored_from = text.parallelism
            self._run.on_restored(self._started, text)

    def on_checkpoint(self, checkpoint: CheckpointId, duration_ms: int, size_bytes: int) -> None:
        self._tell(f"checkpoint {checkpoint} completed in {duration_ms} ms")
        self._run.history.on_completed(checkpoint)
        self._run.listed_at[checkpoint] = self._started.listed
        self._run.injector.after_checkpoint()

    def _tell(self, text: str) -> None:
        self._run.world.tell(self._started.process.name, text)


class Simulation:
    """A world in which something runs: under faults, then without, and then it is judged."""

    LIVENESS_MS = 900_000
    """Virtual time in which everything must come to its end when nothing fails any more."""

    def __init__(self, seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> None:
        self.seed = seed
        self._is_traced = is_traced
        self._events_max = events_max
        self.world = World(seed, is_traced=is_traced)
        self.tasks = Tasks(self.world)
        self.faults: Faults
        self.bounds: list[Bound] = []
        """What modules and classes have instead of their usual values while this runs."""
        self._safety_ms = 0
        """Virtual time until nothing fails any more."""
        self._is_verified = False

    def result(self) -> Result:
        """Run, and return the verdict."""
        violation = self.run()
        world = self.world
        story = tuple(world.story) if violation or self._is_traced else ()
        return Result(self.seed, violation, world.digest, world.events_count, world.now_ms, story)

    def run(self) -> Violation | None:
        """Run both phases; return what was violated, if anything."""
        try:
            with ExitStack() as stack:
                for owner, name, value in self.bounds:
                    stack.enter_context(replaced(owner, name, value))
                self._run()
        except Violation as violation:
            self.world.tell("checker", str(violation))
            return violation
        return None

    def _run(self) -> None:
        """Run both phases.

        Raises:
            Violation
        """
        raise NotImplementedError

    def _finding(self) -> Violation | None:
        """Return what was violated so far."""
        raise NotImplementedError

    def _until(self, is_over: Callable[[], bool], problem: str) -> None:
        world = self.world
        is_done = world.run(
            lambda: self._finding() is not None or is_over(), world.now_ms + self.LIVENESS_MS, self._events_max
        )
        finding = self._finding()
        if finding is not None:
            raise finding
        if not is_done:
            raise Violation("I5", f"{problem} at {world.now_ms} ms after {world.events_count} events")

    def _until_verified(self, name: str, problem: str) -> None:
        """Have a process of this name judge what is there."""

        def verify() -> None:
            self._verify()
            self._is_verified = True

        self.tasks.spawn(SimProcess(self.tasks, name), verify, "main")
        self._until(lambda: self._is_verified, problem)

    def _verify(self) -> None:
        """Judge what is there when all is over, in a process of its own.

        Raises:
            Violation
        """
        raise NotImplementedError

    def _repeat(self, name: str, call: Callable[[], None], pause_ms: Callable[[], int]) -> None:
        """Have a process of this name make ``call`` now, and again after each pause, until nothing fails any more."""
        if not self._is_quiet():
            self.tasks.spawn(SimProcess(self.tasks, name), lambda: self._try(name, call), "main")
            self.world.at(pause_ms(), self._repeat, name, call, pause_ms)

    def _try(self, who: str, call: Callable[[], object]) -> None:
        try:
            call()
        except HeadgateError as problem:
            self.world.tell(who, str(problem))

    def _is_quiet(self) -> bool:
        """Whether users leave everything alone."""
        return self.faults.is_healed


class Run(Simulation):
    """The users of one pipeline, and what goes wrong.

    A scenario is a class that derives from it and says in ``_draw`` what is different.
    """

    IS_PLAIN = False
    SUBJECT = ""
    """In the name of the generator of this kind of runs."""
    RESCALE_RATE = 0.0
    """How often a start has another parallelism."""
    RESCALES_FIRST = False
    """Whether the first start may have another one, too."""
    VERDICT = Verdict
    READS_STATE = True
    """Whether the state in checkpoints is read at the end by some seeds."""

    def __init__(
        self, seed: int, *, is_traced: bool = False, is_plain: bool | None = None, events_max: int = EVENTS_MAX
    ) -> None:
        """``is_plain``: it is about nothing in particular, publishes nothing, and has no values of further types."""
        super().__init__(seed, is_traced=is_traced, events_max=events_max)
        self.is_plain = is_plain = self.IS_PLAIN if is_plain is None else is_plain
        rng = self.world.random
        self.faults = Faults(rng)
        self.network = Network(self.tasks, rng.choice((0, 1, 3)))
        self.disks: dict[str, Disk] = {}
        self.started: list[Started] = []
        self.listed_at: dict[int, list[Splits]] = {}
        self.settings = draw_settings(rng, self._on_round)
        self.injector = FaultInjector(self)
        self.damage = StorageDamage(self.faults, rng, self._disk)
        self.history = History(0, self._on_manifest, self._promised)
        self.clock_shift_ms = 0
        self.is_finished = False
        self._looks_again = rng.random() < 0.7
        self._ended_after_heal = 0
        self._alive_at_heal = 0
        self._safety_ms = rng.choice((1_000, 3_000))
        self.files = FileInputs(seed, self.tasks, self.faults)
        if self.files.is_drawn:
            self.settings.use_files(self.files)
            self.settings.job = self.files.with_more(self.settings.job)
        self.focus = None if is_plain else draw_focus(seed)
        self.stored = StoredStates(seed)
        if not is_plain:
            self.settings.job = with_typed(seed, self.settings.job)
        if self.focus is not None:
            put_in_focus(self.focus, self.settings, self.faults)
            self._safety_ms = LASTS_MS
        outside = Outside(seed, self.tasks, self.faults, lambda: self.history)
        if outside.is_drawn and not is_plain and not self.settings.grows:  # then nothing that was added is read
            self.settings.outside = outside
        openers = {**urls.OPENERS, "sim": lambda name: SimStorage(self._disk(name.split("/")[0]))}
        self.bounds += [(urls, "OPENERS", openers), *self.files.bounds]
        self.rng = random.Random(f"{self.SUBJECT} of seed {seed}")
        self._draw()
        self.history.retained = self.settings.checkpointing.retained

    @classmethod
    def packed(cls, seed: int, **options: Any) -> Run:
        """Return a run with input that comes in larger batches, which takes less time."""
        run = cls(seed, **options)
        run.settings.pack()
        return run

    def _draw(self) -> None:
        """Draw what is different in this scenario, from generators of its own."""

    def _draw_deaths(self, rate: float, faults: Sequence[Fault], budget: int) -> None:
        """Mostly have processes die, and new drivers start."""
        if self.rng.random() < rate:
            self.faults.on |= {self.rng.choice(faults), Fault.WORKER_CRASH}
            self.faults.budget += budget

    def _begin(self) -> None:
        """Have everything begin that is not the pipeline."""

    def _finding(self) -> Violation | None:
        return self.history.finding

    def _is_quiet(self) -> bool:
        return self.is_finished

    def _run(self) -> None:
        world = self.world
        try:
            self._begin()
            self._update_files()
            self.start()
            world.at(10, self.injector.strike)
            world.at(world.random.randint(50, 2_000), self._look)
            world.run(lambda: self.is_finished or self.history.finding is not None, self._safety_ms, self._events_max)
            self._heal()
            self._until(lambda: self.is_finished, "not finished")
            self._until(lambda: not self._living(), "somebody does not end")
            if self._looks_again:  # what is left by what failed, the next start removes
                world.run(lambda: False, world.now_ms + LATE_MS, self._events_max)
                self.is_finished = False
                self.start()
                self._until(lambda: self.is_finished and not self._living(), "not finished when started once more")
                self._check_disks()
            self._until_verified("reader", "the output cannot be read")
        finally:
            self.tasks.take_down()

    def _check_disks(self) -> None:
        for name, disk in self.disks.items():
            objects = {path: stored.data for path, stored in disk.objects.items()}
            found: list[str] = []
            if name in self.settings.job.columns:
                found = list(verdict_module.of_sink(objects))
            elif name == CHECKPOINTS:
                found = list(verdict_module.of_checkpoints(objects, self.settings.checkpointing.retained))
            if found:
                raise Violation("I6", f"left on {name}: {'; '.join(found)}")

    def _look_into(self, process: SimProcess, budget: SpillBudget | None = None) -> None:
        found = list(verdict_module.of_process(process, self.tasks, self.network, budget))
        if found:
            self.history.fail("I6", f"left in {process.name}: {'; '.join(found)}")

    def _disk(self, name: str) -> Disk:
        if name not in self.disks:
            disk = self.disks[name] = Disk(self.tasks, self.faults, name)
            is_sink = name in self.settings.job.columns
            disk.watchers.append(
                (lambda path, data: self.history.on_sink_disk(name, path, data))
                if is_sink
                else (lambda path, data: self.history.on_checkpoints_disk(path, data, disk.objects))
            )
        return self.disks[name]

    def _surroundings(self, process: SimProcess) -> SimSurroundings:
        around = SimSurroundings(process, self.network)
        around.wall_shift_ms = self.clock_shift_ms
        return around

    def _living(self) -> list[SimProcess]:
        processes = [p for one in self.started for p in (one.process, *one.spark.workers, *one.spark.idle)]
        return [process for process in processes if process.is_alive]

    def processes(self) -> list[SimProcess]:
        """Return those that die when the power is cut."""
        return [process for one in self.started for process in (*one.spark.workers, one.process)]

    def _update_files(self) -> None:
        """No process runs the pipeline: something may happen to the input."""
        self.settings.update_files()

    # -- the program ------------------------------------------------------------------------------------------------

    def definition(
        self, listed: Sequence[Splits] | None = None, trouble: Callable[[], bool] = lambda: False
    ) -> PipelineDefinition:
        """Build the pipeline as a user's program does, but for limits that the public API does not offer."""
        settings = self.settings
        p = hg.Pipeline(
            NAME,
            parallelism=settings.parallelism,
            max_parallelism=8,
            checkpointing=settings.checkpointing,
            restart=settings.restart,
            bad_records=hg.DeadLetter(self._sink_to("bad-records")) if settings.job.is_picky else None,
            on_damaged_checkpoint=settings.on_damaged,
            loop_memory_bytes=settings.loop_memory_bytes,
            max_drift=settings.max_drift,
        )
        self._build(p, settings.listed() if listed is None else listed, trouble)
        found = p.definition(settings.parallelism)
        checkpoints = replace(found.config.checkpoints, inline_bytes_max=settings.inline_bytes_max)
        runtime = found.config.runtime
        if settings.credit_bytes is not None:
            runtime = replace(runtime, credit_bytes=settings.credit_bytes)
        config = replace(
            found.config, checkpoints=checkpoints, runtime=runtime, start=settings.start, state=settings.state
        )
        return replace(found, config=config)

    def _build(self, p: hg.Pipeline, listed: Sequence[Splits], trouble: Callable[[], bool]) -> None:
        """Add sources, steps and sinks."""
        sources = [p.source(self._source(splits, i, trouble), name=f"source{i}") for i, splits in enumerate(listed)]
        self.settings.job.build(sources, self._sink_to)
        if self.settings.outside is not None:
            for i, source in enumerate(sources):
                self.settings.outside.watch(source, i)

    def _source(self, listed: Splits, index: int, trouble: Callable[[], bool]) -> Source:
        """Return the source with this number."""
        if self.settings.files is not None:
            return self.settings.files.source(index)
        return PacedSplits(listed, self.settings.pace, self._now_ms, trouble)

    def _sink_to(self, name: str) -> Sink:
        return hg.FileSink(f"sim://{name}", roll_interval=self.settings.roll_interval)

    def _now_ms(self) -> int:
        return self.world.now_ms

    # -- the user ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the pipeline, whatever else runs it."""
        may_rescale = self.RESCALE_RATE and (self.started or self.RESCALES_FIRST)
        if may_rescale and self.rng.random() < self.RESCALE_RATE:
            self.settings.parallelism = self.rng.choice((1, 2, 3))
        started = self._add_start(self._on_driver_gone)
        self.tasks.spawn(started.process, lambda: self._drive(started), "main")

    def _add_start(self, on_gone: Callable[[int], None]) -> Started:
        """Return one more start, with a process in which nothing runs yet."""
        if len(self.started) >= DRIVERS_MAX:
            raise Violation("I5", f"{DRIVERS_MAX} drivers in a row did not finish the pipeline")
        process = SimProcess(self.tasks, f"d{len(self.started)}", on_gone)
        attempts = self.settings.attempts
        spark = SimSpark(process, self.network, self.faults, attempts, self._surroundings, self._look_into)
        self.started.append(Started(process, spark, self.settings.listed()))
        return self.started[-1]

    def _drive(self, started: Started) -> None:
        """What the user's program does in its process."""
        started.process.end(0 if self._run_driver(started) is None else 1)

    def _run_driver(self, started: Started, *, beats: bool = False, drains: bool = False) -> BaseException | None:
        """Run the pipeline; return what was wrong. ``beats``: with signs of life. ``drains``: ask it to, at once."""
        process = started.process
        around = self._surroundings(process)
        try:
            definition = self.definition(started.listed, lambda: self.faults.strikes(Fault.USER_CODE))
            started.spark.definition = definition = self._ready(definition, around)
            watcher = Watcher(self, started)
            driver = Driver(definition, started.spark, watcher, FINGERPRINT, beats=beats, around=around)
        except HeadgateError as problem:
            self.world.tell(process.name, str(problem))
            return problem
        started.driver = driver
        driver.start()
        if drains:
            driver.drain()
        driver.join()
        if self.faults.is_healed:
            self.tasks.park(LATE_MS)
            self._look_into(process)
        error = driver.result.exception()
        if error is None:
            self.is_finished = self.is_finished or self._is_over(driver.result.result())
            return None
        words = f"{type(error).__name__}: {error}"
        self.world.tell(process.name, words)
        self._judge(words)
        if isinstance(error, PipelineFailed) and error.is_for_good and started.restored_from:
            self.settings.parallelism = started.restored_from  # another one was perhaps what was wrong
        if isinstance(error, HeadgateError):
            self._apply_remedy(error)
        return error

    def _ready(self, definition: PipelineDefinition, around: SimSurroundings) -> PipelineDefinition:
        """Do what a program does in front of its driver; return what that runs."""
        return definition

    def _on_manifest(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        """A checkpoint completes, and promises ``files``, by sink."""
        self.damage.on_manifest(manifest, files)

    def _promised(self, committables: Sequence[Committable]) -> dict[str, frozenset[str]]:
        """Return what committables promise, by sink."""
        return files_of(committables)

    def on_restored(self, started: Started, said: Continuation) -> None:
        """A driver says what a generation continues from."""
        self.history.on_restored(said.generation, said.checkpoint)

    def _is_over(self, result: RunResult) -> bool:
        """Whether no process starts a pipeline again that ended so."""
        return result.is_finished

    def _judge(self, words: str) -> None:
        """Look for what must not be read in an error; what is done next does not go by that."""
        if _BUG.search(words):
            self.history.fail("thread", words)

    def _apply_remedy(self, error: HeadgateError) -> None:
        """Do what an error says."""
        self.damage.apply_remedy(error.remedy)

    def _on_driver_gone(self, code: int) -> None:
        if self.faults.is_healed and not self.is_finished:
            self._ended_after_heal += 1
            if self._ended_after_heal > DRIVERS_AFTER_HEAL_MAX + self._alive_at_heal:
                raise Violation("I5", "without any fault, driver after driver ends")
        rng = self.world.random
        if rng.random() < 0.3 and code != 1:
            self.settings.parallelism = rng.choice((1, 2, 3))
        self.settings.hidden -= {name for name in sorted(self.settings.hidden) if rng.random() < 0.6}
        self.world.at(rng.randint(1, 200), self._start_if_none)

    def _start_if_none(self) -> None:
        if self.is_finished or any(one.process.is_alive for one in self.started):
            return
        if self.history.standing:
            self.damage.strike(self.history)
        self._update_files()
        self.start()

    def _on_round(self, loop: str, number: int) -> None:
        self.history.on_round(self.tasks.current.process.name, loop, number)

    def _look(self) -> None:
        """A user reads what is committed, now and then."""
        if not self.is_finished:
            self.tasks.spawn(SimProcess(self.tasks, "onlooker"), self._list_committed, "main")
            self.world.at(self.world.random.randint(200, 3_000), self._look)

    def _list_committed(self) -> None:
        for sink in self.settings.job.columns:
            try:
                files = committed_files(f"sim://{sink}")
            except HeadgateError:
                continue
            self.history.on_read(sink, files)

    def _heal(self) -> None:
        self.world.tell("world", "heals")
        self.faults.heal()
        self._alive_at_heal = sum(one.process.is_alive for one in self.started)
        for one in self.started:
            for process in (one.process, *one.spark.workers):
                process.resume()
        self._start_if_none()

    def _verify(self) -> None:
        verdict = self.VERDICT(self)
        verdict.check()
        if self.READS_STATE:
            self.damage.mend()
            self.stored.check(self.settings.job, verdict.read, is_exact=isinstance(self.settings.judge, Exactly))


def run_seed(seed: int, *, is_traced: bool = False, is_plain: bool = False, events_max: int = EVENTS_MAX) -> Result:
    """Run one seed of an ordinary run."""
    return Run.packed(seed, is_traced=is_traced, is_plain=is_plain, events_max=events_max).result()
