"""Pipelines between sources and sinks that users wrote, in the machine room."""

from __future__ import annotations

from collections import Counter

from tests.conftest import IS_DEEP

from headgate.connectors import ledger_sink
from headgate.runtime.checkpoints import snapshot_writer
from headgate.sim.scenarios.user_pipelines import CustomRun, Kind

SMOKE = (35, 36, 8, 13, 6)
"""Without ``IS_DEEP`` only until what they are for was reached."""
LIMITED = (10, 13) if IS_DEEP else (13,)


def test_users_sinks_have_every_record_once() -> None:
    kinds: Counter[Kind] = Counter()
    aborted = refused = forgotten = went_back = 0
    usual = snapshot_writer.PAYLOAD_BYTES_MAX
    for seed in SMOKE:
        run = CustomRun(seed)
        assert (seed, run.run()) == (seed, None)
        assert len(run.history.completed) > 2
        kinds.update(run.kinds.values())
        database = run.database
        aborted, refused = aborted + database.aborted_count, refused + database.refused_count
        forgotten += database.forgotten_count
        went_back += len(run.history.went_back)
        has_both = min(kinds[Kind.TWO_PHASES], kinds[Kind.LEDGER]) > 2
        if not IS_DEEP and has_both and min(aborted, refused, forgotten, went_back) > 0:
            break
    assert kinds[Kind.TWO_PHASES] > 2
    assert kinds[Kind.LEDGER] > 2
    assert aborted > 0, "prepared transactions were outstanding when something died"
    assert refused > 0, "somebody was replaced, and came late"
    assert forgotten > 0, "a ledger stays small"
    assert went_back > 0, "a start went back past what was committed, and made it again"
    assert usual == snapshot_writer.PAYLOAD_BYTES_MAX


def test_ledgers_go_in_pieces_and_databases_forget_what_is_prepared() -> None:
    usual = ledger_sink.INLINE_BYTES_MAX
    in_pieces = expired = 0
    for seed in LIMITED:
        run = CustomRun(seed)
        assert (seed, run.run()) == (seed, None)
        in_pieces += run.piece_bytes is not None and Kind.LEDGER in run.kinds.values()
        expired += run.expired_count
    assert in_pieces > 0
    assert expired > 0, "what was promised was gone, and somebody brought it back"
    assert usual == ledger_sink.INLINE_BYTES_MAX
