"""Tells sources which input restorable checkpoints still need, so that it is retained (SC30 to SC33).

Counterpart: ``HoldingSource``. ``restart`` tells them when a generation begins, ``coordinator_host`` when checkpoints
were dropped. What is told goes by the log alone, so a replaced driver tells nothing that its successor would not.
Never releases input for a checkpoint that cannot be read.
"""

from __future__ import annotations

from dataclasses import replace

from headgate.connectors.base import HoldContext, HoldingSource
from headgate.errors import CorruptionError, UsageError
from headgate.model.graph import Role
from headgate.model.ids import Generation
from headgate.model.manifest import Manifest, Place
from headgate.model.plan import PipelineDefinition
from headgate.protocol.checkpoints.recovery import ObservedLog, candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.state_reader.lookup import StoredCheckpoint
from headgate.runtime.state_reader.reader import PartReader, states_of
from headgate.runtime.state_reader.schema import Kind

Positions = dict[str, bytes]
"""Split → position."""


class SourceRetention:
    """The sources of one pipeline that retain their input, and the positions last given to them."""

    def __init__(self, definition: PipelineDefinition, log: CheckpointLog, generation: Generation) -> None:
        self._pipeline = definition.config.name
        self._root = definition.config.checkpoint_root
        self._log, self._generation = log, generation
        self._sources = {
            node.name: node.spec
            for node in definition.graph.nodes
            if node.role is Role.SOURCE and isinstance(node.spec, HoldingSource) and node.spec.holds
        }
        self._told: dict[str, list[Positions]] = {}

    def tell(self, observed: ObservedLog) -> None:
        """Tell every source from where on it is needed by the checkpoints in the log that may be restored.

        Raises:
            StorageError: a source, or a checkpoint, cannot be reached now; repeating is safe.
            FencedError: a later generation tells it by now.
        """
        manifests = candidates(observed) if self._sources else []
        for node, source in self._sources.items():
            try:
                needed = [self._positions(manifest, node) for manifest in manifests]
            except CorruptionError:  # what it needs stays held as it is: somebody may bring its file back
                continue
            if self._told.get(node) != needed:
                source.hold(HoldContext(self._pipeline, node, self._log.life_id, self._generation), needed)
                self._told[node] = needed

    def _positions(self, manifest: Manifest, node: str) -> Positions:
        place = manifest.place or Place(self._root, self._pipeline)
        what = f"checkpoint {manifest.checkpoint} of pipeline '{self._pipeline}'"
        checkpoint = StoredCheckpoint(what, self._pipeline, replace(manifest, place=place))
        try:
            storage = checkpoint.storage()
            states = states_of(checkpoint, storage, node, is_counted=False)
        except UsageError:  # the place of a savepoint that is not there any more
            raise CorruptionError(place.url, 0, f"the files of {what}", "no directory") from None
        reader, found = PartReader(checkpoint, storage), Positions()
        for state in states:
            if state.shape.kind is Kind.POSITIONS:
                for piece in state.pieces:
                    for batch in reader.decoded(node, piece).batches:
                        found |= {row["split"]: row["position"] for row in batch.to_pylist()}
        return found
