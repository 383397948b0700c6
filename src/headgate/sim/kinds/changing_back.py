"""Pipelines whose user goes back by hand to an older checkpoint that is retained (SV25 of docs/spec/savepoints.md).

Nobody runs the pipeline then; the command names the older checkpoint and the newest one, and is repeated by some later
starts. Judged beside everything else: a pipeline goes back only if both were named, and once (SV24); what it committed
behind the older checkpoint is produced again, and all else is exact; what was only promised there becomes visible
never. Everything drawn here comes from a generator of its own (SM44).
"""

from __future__ import annotations

import random
from dataclasses import replace

from headgate.codec.log_entry import decode_log_entry
from headgate.errors import CorruptionError, GoBackBehind, HeadgateError, NameAnotherPlace
from headgate.model.config import StartConfig
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Manifest
from headgate.sim.machine.faults import Fault
from headgate.sim.product.ends import Ends
from headgate.sim.product.run import EVENTS_MAX, Run
from headgate.sim.product.settings import CHECKPOINTS, NAME, ROOT
from headgate.sim.product.source import Pace
from headgate.sim.product.workloads import draw_splits

WITHOUT = (Fault.DAMAGE, Fault.AWAY, Fault.DENIED, Fault.POWER_CUT, Fault.CANCEL, Fault.DRAIN)
"""Nobody goes back behind damage here: then it would be refused (SV25), or lose the entry that says where to."""

SAFETY_MS = 2_500
RETAINED = 3
GOES_BACK_RATE = 0.6
REPEATS_RATE = 0.6
"""How often a start repeats the command of the one before."""


class GoingBackRun(Run):
    """A run whose user goes back."""

    def __init__(self, seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> None:
        super().__init__(seed, is_traced=is_traced, is_plain=True, events_max=events_max)
        self._chance = random.Random(f"going back of seed {seed}")
        settings = self.settings
        settings.hidden.clear()
        settings.grows = False
        interval = f"{self._chance.choice((10, 20))}ms"
        settings.checkpointing = replace(settings.checkpointing, interval=interval, retained=RETAINED)
        if settings.files is None:
            rows_count = self._chance.choice((150, 300)) // len(settings.inputs)
            settings.inputs = [draw_splits(self._chance, i, 2, rows_count) for i in range(len(settings.inputs))]
        self.history.retained = RETAINED
        self.faults.on = (self.faults.on - set(WITHOUT)) | {Fault.DRIVER_CRASH}
        self._ends = Ends(self, self._chance, 5, least=2)
        settings.pace = Pace(4, 20, idle_ms=100)
        self._safety_ms = SAFETY_MS
        self.refused_count = self.repeated_count = 0
        self._must_go_on = False
        """Whether the command of the newest start has gone back before."""

    def start(self) -> None:
        """Start the pipeline, perhaps where it was some checkpoints ago."""
        is_alone = not any(one.process.is_alive for one in self.started)
        newest, *others = self._retained() or [0]
        older = [one for one in others if one in self.history.standing]  # of what was left, promises are aborted
        if older and is_alone and not self.faults.is_healed and self._chance.random() < GOES_BACK_RATE:
            self._go_back(self._chance.choice(older), newest)
        elif self._chance.random() >= REPEATS_RATE:
            self.settings.start = StartConfig()
        self._must_go_on = is_alone and self._has_gone_back(newest)
        self.repeated_count += self._must_go_on
        super().start()

    def _has_gone_back(self, newest: int) -> bool:
        """Whether the newest checkpoint descends from what the start names (SV24)."""
        manifest, start = self.history.manifest(newest), self.settings.start
        origin = None if manifest is None else manifest.origin
        return origin is not None and origin.url == start.restore and start.go_back_behind != newest

    def _go_back(self, to: int, behind: int) -> None:
        self.world.tell("user", f"goes back behind checkpoint {behind} to {to}")
        self.history.may_go_back.add((to, behind))
        says = None if self._chance.random() < 0.2 else CheckpointId(behind)  # some have to be told
        self.settings.start = StartConfig(f"{ROOT}/{NAME}/chk-{to}", says)

    def _retained(self) -> list[int]:
        """Return the checkpoints that a user finds in the log, the newest first."""
        found: list[int] = []
        for path, stored in self._disk(CHECKPOINTS).objects.items():
            if path.startswith(f"{NAME}/log/"):
                try:
                    entry = decode_log_entry(stored.data, path)
                except CorruptionError:
                    continue
                found += [int(entry.checkpoint)] if isinstance(entry, Manifest) else []
        return sorted(found, reverse=True)

    def _heed(self, error: HeadgateError) -> None:
        remedy, start = error.remedy, self.settings.start
        if self._must_go_on and isinstance(remedy, GoBackBehind | NameAnotherPlace):
            self.history.fail("SV24", f"a start that is repeated does not go on: {error}")
        if isinstance(remedy, GoBackBehind) and start.restore is not None:
            self.refused_count += 1
            to, behind = int(start.restore.rpartition("-")[2]), remedy.checkpoint
            self.history.may_go_back.add((to, behind))
            self.settings.start = replace(start, go_back_behind=CheckpointId(behind))
        elif isinstance(remedy, NameAnotherPlace):
            self.settings.start = StartConfig()
        super()._heed(error)
