"""Checkpoints that cut a stream at one moment, in simulated pipelines between streams (SC20 to SC25, SM84).

Somebody reads the checkpoints that are there, as any user can, while the pipeline runs and when it is over: the
positions of the source must be those that its hook recorded when the checkpoint began, but for segments that were read
to their end by then.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import headgate as hg
from headgate.connectors.streams import decode_position
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.sim.product.settings import NAME, ROOT
from headgate.sim.world import Violation
from headgate.storage.urls import open_storage
from headgate.store.streams import StreamInfo


def check_cuts(source: str, stream: Callable[[], StreamInfo]) -> int:
    """Compare the positions of ``source`` with the cuts of all checkpoints; return how many segments were compared.

    ``stream`` is looked at behind them: a segment that was read to its end is at the end of a sealed stream.

    Raises:
        Violation: one differs.
        HeadgateError: they cannot be read now.
    """
    manifests = candidates(CheckpointLog(open_storage(ROOT), NAME).observe())
    return sum(_check(manifest, source, stream) for manifest in manifests)


def _check(manifest: Manifest, source: str, stream: Callable[[], StreamInfo]) -> int:
    told = next((state for state in manifest.hooks if state.hook == source and state.checkpoint is None), None)
    if told is None or not told.data:
        return 0
    cut: dict[str, int] = json.loads(told.data)["cut"]
    rows = hg.read_state(f"{ROOT}/{NAME}", source, id=manifest.checkpoint)
    info = stream()
    for split, position in rows.select("split", "position").iter_rows():
        segment = split.rpartition("/")[2]
        at = decode_position(split, position).position
        is_closed = info.is_sealed or int(segment) not in {present.segment_id for present in info.segments}
        has_ended = is_closed and at == info.ends[int(segment)]
        wanted = cut.get(segment, 0)  # of a segment that came later it has nothing (SC44)
        if at != wanted and not has_ended:
            raise Violation("SC21", f"checkpoint {manifest.checkpoint} has {split} at {at}, not {wanted}")
    return rows.height
