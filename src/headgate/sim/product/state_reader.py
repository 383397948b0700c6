"""A user reads the state of checkpoints and savepoints when all is over, and compares it with what it must be (SM72).

All rows of every state of every retained checkpoint; some keys and some key groups, which must be those of the whole;
and of the final checkpoint, the state that plain Python gives for the rows that were read. Drawn from a generator of
its own. Counterpart: ``verdict`` reads the output.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import polars as pl

import headgate as hg
from headgate.errors import UsageError
from headgate.model.ids import key_groups_of_subtask
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.sim.product.records import Row
from headgate.sim.product.settings import NAME, ROOT
from headgate.sim.product.workloads import Branches, Job, Values
from headgate.sim.world import Violation
from headgate.storage.urls import open_storage

RATE = 0.3
"""A user reads the state of so many seeds."""

KEYS_MAX = 3
SUBTASK, GROUP = "_subtask", "_key_group"

Expected = Callable[[Sequence[Row]], Counter[Values]]


def _per_key(rows: Sequence[Row]) -> Counter[Values]:
    return Counter(Counter(row["k"] for row in rows).items())


MODEL: dict[str, tuple[tuple[str, str | None, Expected], ...]] = {
    "numbered": (
        ("number", "count", _per_key),
        ("number", "kept", lambda rows: Counter((row["k"], row["n"]) for row in rows)),
    ),
    "once": (("first", "seen", lambda rows: Counter((row["k"], row["n"], row["v"]) for row in rows)),),
    "kept-by-row": (("by-row", "is_odd", lambda rows: Counter((k, n % 2 == 1) for k, n in _per_key(rows))),),
}
"""By workload: an operator, its state, and what must be in it for the rows that were read."""


class StoredStates:
    """Reads what is there at the end, in a process of its own, when nothing fails any more."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"who reads the state of seed {seed}")
        self.is_drawn = self._rng.random() < RATE
        self.states_count = self.rows_count = self.compared_count = 0

    def check(self, job: Job, read: Sequence[Sequence[Row]], *, is_exact: bool) -> None:
        """Read every retained checkpoint; compare the final one with what follows from the rows that were read.

        Raises:
            Violation
        """
        if not self.is_drawn:
            return
        path = f"{ROOT}/{NAME}"
        final, *older = candidates(CheckpointLog(open_storage(ROOT), NAME).observe())
        self.look(path, final)
        for manifest in older:
            named_by_path = self._rng.random() < 0.5
            at = f"{path}/chk-{manifest.checkpoint}" if named_by_path else path
            self.look(at, manifest, None if named_by_path else manifest.checkpoint)
        self._err(path)
        if is_exact and isinstance(job, Branches):
            for workload in job.workloads:
                for operator, state, expected in MODEL.get(workload.name, ()):
                    self._compare(path, operator, state, expected(read[0]))

    def look(self, path: str, manifest: Manifest, id: int | None = None) -> None:
        """Read every state of one checkpoint or savepoint."""
        catalog = hg.state_catalog(path, id=id)
        for told in catalog.iter_rows(named=True):
            operator, state = told["operator"], told["state"]
            more = [SUBTASK, *([GROUP] if told["keys"] else [])]
            whole = hg.read_state(path, operator, state, id=id)
            self.states_count += 1
            self.rows_count += whole.height
            what = f"state '{state}' of '{operator}' in checkpoint {manifest.checkpoint}"
            _require(told["rows"] in (None, whole.height), f"{what} has {whole.height} rows, not {told['rows']}")
            columns = [*whole.columns, *(name for name in more if name not in whole.columns)]
            placed = hg.read_state(path, operator, state, id=id, columns=columns)
            _require(_rows(placed.select(whole.columns)) == _rows(whole), f"{what} differs when columns are chosen")
            if told["keys"]:
                _require(_is_owned(placed, manifest), f"{what} has rows with a subtask that does not own their key")
                self._choose(path, told, id, whole, what, manifest.max_parallelism)

    def _choose(
        self, path: str, told: dict[str, Any], id: int | None, whole: pl.DataFrame, what: str, groups_count: int
    ) -> None:
        """Read it again in two halves of its key groups, and some keys of it."""
        operator, state = told["operator"], told["state"]
        groups = list(range(groups_count))
        self._rng.shuffle(groups)
        half = groups_count // 2
        parts = [
            hg.read_state(path, operator, state, id=id, key_groups=some) for some in (groups[:half], groups[half:])
        ]
        _require(_rows(parts[0]) + _rows(parts[1]) == _rows(whole), f"{what} is not what its key groups have")
        keys = whole.select(told["keys"]).unique(maintain_order=True).rows()
        if any(value is None for key in keys for value in key):
            return  # nobody can ask for a key that is null
        chosen = self._rng.sample(keys, min(len(keys), KEYS_MAX))
        asked = [key if len(key) > 1 else key[0] for key in chosen]
        batches = list(hg.read_state_batches(path, operator, state, id=id, keys=asked))
        found = sum((_rows(pl.DataFrame(batch)) for batch in batches), Counter[str]())
        is_asked = pl.Series([key in chosen for key in whole.select(told["keys"]).rows()], dtype=pl.Boolean)
        _require(found == _rows(whole.filter(is_asked)), f"{what} has other rows of {asked} when these are asked for")

    def _compare(self, path: str, operator: str, state: str | None, wanted: Counter[Values]) -> None:
        found = Counter(hg.read_state(path, operator, state).rows())
        self.compared_count += 1
        lost, more = sorted((wanted - found).elements()), sorted((found - wanted).elements())
        _require(found == wanted, f"'{state}' of '{operator}' lacks {lost[:4]} and has {more[:4]} more")

    def _err(self, path: str) -> None:
        """Ask for what is not there."""
        mistakes: list[Callable[[], object]] = [
            lambda: hg.read_state(path, "nobody"),
            lambda: hg.state_catalog(path, id=1_000_000),
            lambda: hg.state_catalog(f"{ROOT}/nowhere"),
            lambda: hg.state_catalog(""),
            lambda: hg.read_state(path, "source0", "nothing"),
            lambda: hg.read_state(path, "source0", columns=["nothing"]),
            lambda: hg.read_state(path, "source0", keys=[1]),
        ]
        try:
            self._rng.choice(mistakes)()
        except UsageError:
            return
        raise Violation("state", "somebody was shown what is not there")


def _rows(frame: pl.DataFrame) -> Counter[str]:
    """Return its rows, to be compared: values may be lists, which nothing can be counted by, and NaN."""
    return Counter(map(repr, frame.rows()))


def _is_owned(placed: pl.DataFrame, manifest: Manifest) -> bool:
    """Whether each row was with the subtask that owned the group of its key."""
    owned = [
        key_groups_of_subtask(subtask, manifest.max_parallelism, manifest.parallelism)
        for subtask in range(manifest.parallelism)
    ]
    return all(group in owned[subtask] for subtask, group in placed.select(SUBTASK, GROUP).iter_rows())


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise Violation("state", problem)
