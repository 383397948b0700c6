"""Sources that set their own barrier, and a hook that puts the markers: what goes wrong with both (SM40).

The hook writes onto the tapes of the world outside (``tapes``) and fails before and after its effect, or gets stuck; a
driver dies between hook and trigger. Whatever happens, every record counts once, every completed checkpoint is cut
behind its marker on every tape, and its manifest holds what the hook returned (I12). Drawn from a generator of its own,
in a mode of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import headgate as hg
from headgate.connectors.base import InducedSource, Source
from headgate.model.manifest import Manifest
from headgate.sim.kinds.tapes import HOOK, HOOK_TIMEOUT_MS, SPREAD_MS, Outside, TapeHook, TapeSource
from headgate.sim.machine.faults import Fault
from headgate.sim.product.history import History
from headgate.sim.product.run import EVENTS_MAX, Result, Run, result_of
from headgate.sim.product.settings import Settings
from headgate.sim.product.verdict import Verdict
from headgate.sim.product.workloads import Splits, draw_splits


class InducedSettings(Settings):
    """The settings of any run, for a pipeline some of whose sources set their own barriers."""

    tapes: Outside
    induced: frozenset[int]

    def _add_hooks(self, p: hg.Pipeline) -> None:
        p.add_hook(HOOK, TapeHook(self.tapes), timeout=f"{HOOK_TIMEOUT_MS}ms")

    def _source(
        self, listed: Splits, index: int, now_ms: Callable[[], int], trouble: Callable[[], bool]
    ) -> Source | InducedSource:
        if index in self.induced:
            return TapeSource(self.tapes, list(listed), self.pace, now_ms)
        return super()._source(listed, index, now_ms, trouble)


class _Verdict(Verdict):
    """Positions on tapes count markers too."""

    def _rows_read(self, splits: Splits, positions: Mapping[str, bytes]) -> dict[str, int]:
        found = super()._rows_read(splits, positions)
        assert isinstance(self._settings, InducedSettings)
        tapes = self._settings.tapes.tapes
        return {name: tapes[name].rows_before(at) if name in tapes else at for name, at in found.items()}


class InducedRun(Run):
    """A run with hooks and markers."""

    def __init__(
        self, seed: int, *, is_traced: bool = False, is_plain: bool = True, events_max: int = EVENTS_MAX
    ) -> None:
        """Draw."""
        super().__init__(seed, is_traced=is_traced, is_plain=is_plain, events_max=events_max)
        drawn = self.settings
        rng = random.Random(f"induced of seed {seed}")
        self.faults.on -= {Fault.DRAIN}  # a drained source is cut where it is
        self._safety_ms = SPREAD_MS
        self.faults.budget = 6
        values = {each.name: getattr(drawn, each.name) for each in fields(Settings)}
        settings = self.settings = InducedSettings(
            **{**values, "hidden": set(), "grows": False, "files": None, "outside": None}
        )
        count = len(settings.inputs)
        rows_count = rng.choice((60, 150, 300)) // count
        settings.inputs = [draw_splits(rng, i, rng.choice((1, 2, 3)), rows_count) for i in range(count)]
        induced = frozenset(range(count)) if rng.random() < 0.5 else frozenset({rng.randrange(count)})
        settings.checkpointing = replace(
            drawn.checkpointing, tolerable_failures=20, timeout=f"{rng.choice((200, 500))}ms"
        )
        self._put_on_tapes(seed, induced)
        on_manifest = self.history.on_manifest
        self.history = History(drawn.checkpointing.retained, lambda manifest, files: self._on_manifest(manifest, files))
        self._harm_on_manifest = on_manifest

    def _put_on_tapes(self, seed: int, induced: frozenset[int]) -> None:
        """Have these sources read tapes."""
        settings = self.settings
        assert isinstance(settings, InducedSettings)
        settings.induced = induced
        self.tapes = settings.tapes = Outside(self, seed, {i: settings.inputs[i] for i in sorted(induced)})

    def _on_manifest(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        self.tapes.on_manifest(manifest)
        self._harm_on_manifest(manifest, files)

    def start(self) -> None:
        """See ``Run``."""
        if not self.started:
            self.tapes.begin()
        super().start()

    def _verify(self) -> None:
        _Verdict(self.settings, self.history, self.listed_at).check()
        self._is_verified = True


def run_seed(seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> Result:
    """Run one seed."""
    return result_of(InducedRun(seed, is_traced=is_traced, events_max=events_max), seed, is_traced=is_traced)
