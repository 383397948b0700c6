"""Pipelines that are reset by their users, whatever process runs them then (SO2–SO5 of docs/spec/starting-over.md).

A command resets the pipeline, with its program or without; it may be stopped for long or killed over it, and it may
meet drivers that live. Judged beside everything else: the process that claims after the step finds empty targets,
nothing of before is committed from then on, none of the checkpoints before is restored, and what is committed in the
end is what one run makes, once. Everything drawn here comes from a generator of its own.
"""

from __future__ import annotations

from dataclasses import replace

from headgate.codec.json_files import decode_log_entry
from headgate.connectors.files.publish_log import OWNERS
from headgate.connectors.registry import targets_of
from headgate.errors import HeadgateError
from headgate.model.manifest import Claim
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import RunResult
from headgate.runtime.driver.reset import Reset
from headgate.sim.machine.surroundings import SimSurroundings
from headgate.sim.machine.tasks import SimProcess
from headgate.sim.machine.world import Fault
from headgate.sim.product.run import Run
from headgate.sim.product.settings import CHECKPOINTS, NAME, ROOT

WITHOUT = (Fault.DAMAGE, Fault.AWAY, Fault.DENIED, Fault.DRAIN, Fault.CANCEL)
"""No start goes back past damage or drains here: what is visible is then a part of what a whole run makes."""

RESETS_MAX = 4
STEP_MS = 30
"""So soon after its step a reset is still busy."""

PROGRAM_RATE = 0.5
"""How often a reset has the program, as ``headgate run --fresh`` does."""

ENDS_RATE = 0.7
"""How often the user ends the process that runs the pipeline first.

And mostly starts it again only when the reset is over.
"""

TRIES_MAX = 5
"""How often a user repeats a command that fails."""

WAITS_RATE = 0.98
"""How often a user who wants to start over, and finds no checkpoint, looks again in a moment."""

KILL_RATE = 0.25
PAUSE_RATE = 0.25
"""Of resets that live, or have just taken their step."""


class ResettingRun(Run):
    """A run with user has that the pipeline start over, now and then."""

    IS_PLAIN = True
    SUBJECT = "starting over"

    def _draw(self) -> None:
        self.settings.fix_input()
        self.faults.on -= set(WITHOUT)
        self._resets: list[SimProcess] = []
        self._steps_at: dict[SimProcess, int] = {}
        """How often it had started over when a driver was started."""
        self.carried_out_count = self.finished_count = 0
        """Resets that came to their end, and those that the next start finished."""
        self._steps_count = 0
        self._disk(CHECKPOINTS).watchers.append(self._on_change)
        self.world.at(self.rng.randint(50, 500), self._want)

    # -- the user who starts over -----------------------------------------------------------------------------------

    def _want(self) -> None:
        """Have the user start over now, and perhaps again later."""
        if self.faults.is_healed or self.is_finished or len(self._resets) >= RESETS_MAX:
            return
        if not self.history.completed and self.rng.random() < WAITS_RATE:
            self.world.at(20, self._want)
            return
        process = SimProcess(self.tasks, f"reset{len(self._resets)}", self._on_reset_gone)
        self._resets.append(process)
        self.world.tell("user", f"starts {process.name}")
        if self.rng.random() < ENDS_RATE:
            for other in super().processes():
                other.kill()
        has_program = self.rng.random() < PROGRAM_RATE
        self.tasks.spawn(process, lambda: self._reset(process, has_program=has_program), "main")
        self._strike(process, self.rng.choice((20, 80, 400)))
        self.world.at(self.rng.randint(100, 900), self._want)

    def _strike(self, process: SimProcess, within_ms: int) -> None:
        """Perhaps have the command die soon, or stop for a while."""
        at_ms = self.rng.randint(1, within_ms)
        if self.rng.random() < KILL_RATE:
            self.world.at(at_ms, process.kill)
        elif self.rng.random() < PAUSE_RATE:
            self.world.at(at_ms, process.pause)
            self.world.at(at_ms + self.rng.choice((100, 700, 7_000)), process.resume)

    def _on_change(self, path: str, data: bytes | None) -> None:
        """Something of the checkpoints changed: if that was the step of a reset, perhaps strike in the middle of it."""
        if len(self.history.steps) > self._steps_count:
            self._steps_count = len(self.history.steps)
            for process in self._resets:
                self._strike(process, STEP_MS)

    def _reset(self, process: SimProcess, *, has_program: bool) -> None:
        """Give the command until it ends well."""
        for number in range(TRIES_MAX):
            if self._is_reset(process, has_program=has_program or number > 1):  # some have to be told that it takes it
                process.end(0)
            self.tasks.park(20)
        process.end(1)

    def _is_reset(self, process: SimProcess, *, has_program: bool) -> bool:
        """Do what the command does in its process; return whether it ended well."""
        steps_count = len(self.history.steps)
        try:
            program = self.definition() if has_program else None
            with Reset.holding_the_lock(ROOT, NAME, program, self._surroundings(process)) as resetting:
                resetting.finish()
                plan = resetting.plan()
                if not plan.is_empty:
                    resetting.carry_out(plan)
                    self._carried_out(steps_count)
        except HeadgateError as problem:
            self.world.tell(process.name, str(problem))
            self._judge(f"{type(problem).__name__}: {problem}")
            return False
        return True

    def _carried_out(self, steps_count: int) -> None:
        """The command says that everything is gone: it is, unless another process has begun to start over since."""
        self.carried_out_count += 1
        if len(self.history.steps) == steps_count + 1:
            self.history.on_emptied("SO5", "a reset has ended")

    def _start_if_none(self) -> None:
        is_reset = any(process.is_alive for process in self._resets)
        if not is_reset or self.faults.is_healed or self.rng.random() >= ENDS_RATE:
            super()._start_if_none()

    def _on_reset_gone(self, code: int) -> None:
        self.world.at(self.rng.randint(1, 200), self._start_if_none)

    def _ready(self, definition: PipelineDefinition, around: SimSurroundings) -> PipelineDefinition:
        """Finish a reset that was cut short, and have the first claim write down what the sinks write to (SO3)."""
        self._steps_at[self.tasks.current.process] = len(self.history.steps)
        definition = replace(definition, targets=targets_of(definition.graph))
        if Reset.is_unfinished(ROOT, NAME):
            with Reset.holding_the_lock(ROOT, NAME, definition, around) as resetting:
                self.finished_count += resetting.finish()
        return definition

    # -- what differs for everybody else ------------------------------------------------------------------------------

    def processes(self) -> list[SimProcess]:
        """Return those that die when the power is cut."""
        return [*super().processes(), *self._resets]

    def _check_disks(self) -> None:
        """Lives that are over stay on record, at the sinks too; and orders that no entry names, until a claim (SO2)."""
        for sink in self.settings.job.columns:
            self._disk(sink).forget_past(f"{OWNERS}/")
        objects = self._disk(CHECKPOINTS).objects
        counting = {claim.order for path, stored in objects.items() if (claim := _claim(path, stored.data))}
        for path in list(objects):
            room, _, name = path.removeprefix(f"{NAME}/").partition("/")
            if room == "lives" or (room == "resets" and name not in counting):
                del objects[path]
        super()._check_disks()

    def _living(self) -> list[SimProcess]:
        return [*super()._living(), *(process for process in self._resets if process.is_alive)]

    def _is_over(self, result: RunResult) -> bool:
        """Whether it has finished, and no process has had it start over since; while a user does.

        It is started again.
        """
        is_as_it_was = self._steps_at[self.tasks.current.process] == len(self.history.steps)
        return super()._is_over(result) and is_as_it_was and not any(process.is_alive for process in self._resets)

    def _heal(self) -> None:
        for process in self._resets:
            process.resume()
        super()._heal()


def _claim(path: str, data: bytes) -> Claim | None:
    entry = decode_log_entry(data, path) if path.startswith(f"{NAME}/log/") else None
    return entry if isinstance(entry, Claim) else None
