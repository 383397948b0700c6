"""Smallest scenarios for rules of loops whose violation a run makes good again, or hardly ever meets."""

from __future__ import annotations

from headgate.model.ids import ChannelIndex, CheckpointId, SubtaskId, VertexId
from headgate.protocol.checkpoints import align
from headgate.protocol.loops import head as loop_head
from headgate.protocol.loops import rounds
from headgate.protocol.loops.part import LoopPlace
from headgate.protocol.subtasks import subtask

FIRST, SECOND = SubtaskId(VertexId("head"), 0), SubtaskId(VertexId("head"), 1)
REGULAR, BACK = ChannelIndex(0), ChannelIndex(1)
ONE = CheckpointId(1)


def first_probe_never_ends() -> None:
    """L34: after the first probe of a generation comes another one, which does not carry the last watermark."""
    prober = rounds.LoopProber([FIRST], [FIRST], [], [], has_rounds=False)
    prober.handle(rounds.EntranceEnded(FIRST))
    effects = prober.handle(rounds.ProbeReturned(FIRST, 1, 0))
    assert effects == [rounds.StartProbe(rounds.Probe(2), effects[0].after_ms)]  # type: ignore[union-attr]


def hold_ends_with_the_abort() -> None:
    """L5, L6: an abort releases the channel that waits for its barrier."""
    head = loop_head.LoopHead([BACK])
    head.handle(loop_head.SentinelReceived(BACK, ONE))
    assert align.UnblockChannels((BACK,)) in head.handle(loop_head.Released(ONE))


def abort_drops_the_log() -> None:
    """L5: an abort releases the log and the frozen state."""
    head = loop_head.LoopHead([BACK])
    head.handle(loop_head.SnapshotTaken(ONE))
    assert loop_head.DropLog(ONE) in head.handle(loop_head.Released(ONE))


def head_finishes_when_the_end_is_back() -> None:
    """L29: a head has finished when its end of data is back on every feedback channel."""
    machine = subtask.Subtask(1, place=LoopPlace(outside=frozenset({REGULAR}), feedback=frozenset({BACK})))
    machine.handle(subtask.EndReceived(REGULAR))
    assert subtask.ReportFinished() not in machine.handle(subtask.LoopEnded())
    assert machine.handle(subtask.EndReceived(BACK)) == [subtask.ReportFinished()]


def rounds_go_on_from_the_lowest() -> None:
    """L36: after a restore the lowest round that any head was in begins again."""
    prober = rounds.LoopProber([FIRST, SECOND], [FIRST, SECOND], [], [], has_rounds=True)
    prober.handle(rounds.EntranceEnded(FIRST, 1, 2))
    effects = prober.handle(rounds.EntranceEnded(SECOND, 2, 2))
    assert effects == [rounds.StartProbe(rounds.Probe(1, 1, is_closing=True), 0)]
