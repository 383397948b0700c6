"""Pipelines with subtasks that share a stream by a reader group, in the machine room (docs/spec/group-source.md, SM96).

As any pipeline between streams (``streams``), with all that happens to those. Beside it a user tries to join the
group and to move it, and now and then deletes it, as any user can; and the cut in each checkpoint must be where its
source was. Drawn from a generator of its own, in a mode of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import headgate as hg
from headgate.connectors.streams import decode_position
from headgate.errors import HeadgateError, UsageError
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.sim.product.settings import NAME, ROOT
from headgate.sim.streams.streams import STORE, StreamRun, StreamSettings
from headgate.sim.world import Violation
from headgate.storage.urls import open_storage
from headgate.store.reader_groups import ReaderGroup
from headgate.store.store import Store
from headgate.store.streams import StreamCut

GROUP = "shared"
SOURCE = "source0"

DELETES_RATE = 0.03
"""So often a user who looks deletes the group."""


class GroupedRun(StreamRun):
    """A run with a source that reads by a reader group."""

    def _draw(self) -> None:
        super()._draw()
        settings = self.settings
        assert isinstance(settings, StreamSettings)
        self.cuts = settings.cuts = False
        settings.group = GROUP
        self._meddling = random.Random(f"who meddles with the group of seed {self.seed}")
        self.refused_count = self.deleted_count = self.compared_count = 0
        self.world.at(30, self._repeat, "meddler", self._meddle, lambda: self._meddling.randint(10, 150))

    def _meddle(self) -> None:
        try:
            store = Store.shared(STORE)
            if not self.faults.is_healed and self._meddling.random() < DELETES_RATE:
                self.deleted_count += store.delete_reader_group(GROUP)
            group = store.reader_group(GROUP)
            self._try(self._meddling.choice(CALLS), group)
            self._compare()
        except HeadgateError as problem:
            self.world.tell("meddler", str(problem))

    def _try(self, call: Callable[[ReaderGroup], object], group: ReaderGroup) -> None:
        try:
            call(group)
        except UsageError:
            self.refused_count += 1
            return
        self.history.fail("GS1", "somebody else used the group of the pipeline")

    def _verify(self) -> None:
        super()._verify()
        self._compare()

    def _compare(self) -> None:
        """Compare the cuts in all checkpoints with the positions of their sources (GS13)."""
        for manifest in candidates(CheckpointLog(open_storage(ROOT), NAME).observe()):
            told = next((state for state in manifest.hooks if state.hook == SOURCE), None)
            if told is None or told.data is None:
                raise Violation("GS13", f"checkpoint {manifest.checkpoint} has no cut of the group")
            cut = StreamCut.parse(json.loads(told.data)["cut"])
            rows = hg.read_state(f"{ROOT}/{NAME}", SOURCE, id=manifest.checkpoint)
            for split, data in rows.select("split", "position").iter_rows():
                at, segment = decode_position(split, data).position, int(split.rpartition("/")[2])
                if cut.positions.get(segment, 0) != at:
                    text = f"checkpoint {manifest.checkpoint} has {split} at {at}, and its group at {cut}"
                    raise Violation("GS13", text)
                self.compared_count += 1


CALLS: tuple[Callable[[ReaderGroup], object], ...] = (
    lambda group: group.join("meddler"),
    lambda group: group.checkpoint("meddled"),
    lambda group: group.forget_checkpoint("checkpoint-1"),
    lambda group: group.reset(start="latest"),
)
