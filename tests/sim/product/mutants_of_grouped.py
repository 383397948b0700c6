"""Planted bugs of pipelines that read by a reader group, for the simulator (SM96)."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

from tests.mutants.harness import Mutant, patched

from headgate.connectors.hooks import ASK_AGAIN
from headgate.connectors.streams.group_hook import GroupCheckpointHook
from headgate.protocol.store import group_claims
from headgate.store.cuts import StreamCut
from headgate.store.reader_groups import group_start


def _where_it_is(hook: GroupCheckpointHook) -> StreamCut:
    catalogue, name, stream = hook._group._catalogue, hook._name, hook._stream
    stream_id = catalogue.find_group(name).group.streams[stream]
    return StreamCut(stream, stream_id, catalogue.group_cuts(name, None)[stream])


def a_restart_leaves_the_group_where_it_is() -> AbstractContextManager[None]:
    """GS5: what was read behind the checkpoint is not read again."""

    def restore(self: GroupCheckpointHook, checkpoint_id: int, data: bytes | None) -> None:
        self._group.begin(group_start("earliest", [_where_it_is(self)]))

    return patched(GroupCheckpointHook, "restore", restore)


def the_hook_answers_before_all_have_told() -> AbstractContextManager[None]:
    """GS13: the cut is where the group was."""

    def trigger(self: GroupCheckpointHook, checkpoint_id: int) -> Any:
        if not self._group.ask(checkpoint_id):
            return ASK_AGAIN
        return json.dumps({"format": 1, "group": self._name, "cut": str(_where_it_is(self))}).encode()

    return patched(GroupCheckpointHook, "trigger", trigger)


def anybody_joins() -> AbstractContextManager[None]:
    """GS1: so programs take segments away from the pipeline."""
    return patched(group_claims, "objection", lambda claim, claimant: None)


ALL: dict[Mutant, int] = {
    a_restart_leaves_the_group_where_it_is: 11,
    the_hook_answers_before_all_have_told: 0,
    anybody_joins: 0,
}
