"""Sinks that users write, in real worker processes that are killed."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark import cloudpickle
from tests import sqlite_sinks
from tests.runtime.running import definition_of, pipeline_at
from tests.sqlite_sinks import SqliteLedgerSink, SqliteSink, connect

import headgate as hg
from headgate.model.plan import PipelineDefinition

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests
cloudpickle.register_pickle_by_value(sqlite_sinks)

ROWS = 4_000


def numbering(root: Path, parallelism: int, sink: Any, **options: Any) -> PipelineDefinition:
    """A pipeline that gives each number to ``sink``."""
    pipeline = pipeline_at(root, parallelism=parallelism, **options)
    numbers = hg.Generator(
        columns={"number": hg.RowNumber()}, rows=ROWS, rows_per_second=4_000, splits=3, batch_rows=50
    )
    rows = pipeline.source(numbers, name="in")
    rows.select("number", text=pl.col("number").cast(pl.String)).sink(sink, name="out")
    return definition_of(pipeline)


class Pieces(SqliteLedgerSink):
    """A ledger with a piece for each batch."""

    piece_bytes = 1


KINDS = {"two phases": SqliteSink, "ledger": SqliteLedgerSink, "ledger in pieces": Pieces}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_sink_that_a_user_wrote_has_every_record_once_whoever_is_killed(
    start: Any, tmp_path: Path, kind: Any
) -> None:
    target = str(tmp_path / "target.db")
    run = start(numbering(tmp_path, 2, kind(target)))
    run.wait_checkpoints(2)
    run.kill(0)
    run.wait_restarts(1)
    run.wait_checkpoints(1)
    run.driver.stop()
    run.result()
    again = start(numbering(tmp_path, 3, kind(target)))
    again.wait_checkpoints(1)
    again.kill(1)
    assert again.result().is_finished
    with connect(target) as connection:
        found = connection.execute("select number, text from numbers order by number").fetchall()
        waiting = connection.execute("select count(*) from waiting").fetchone()
    assert found == [(n, str(n)) for n in range(ROWS)]
    assert waiting == (0,)


class Leaving(SqliteSink):
    """A sink whose client ends its process."""

    def prepare(self, transaction: Any, name: str, fence: hg.Fence) -> None:
        sys.exit("the client gave up")


def test_a_sink_that_ends_its_process_while_it_prepares_fails_the_pipeline(start: Any, tmp_path: Path) -> None:
    run = start(numbering(tmp_path, 1, Leaving(str(tmp_path / "target.db"))))
    with pytest.raises(hg.PipelineFailed, match="SystemExit: the client gave up"):
        run.result()


class Expiring(SqliteSink):
    """A sink whose target ends what nobody decides within an hour."""

    transaction_timeout = "1h"


def unreachable(self: Any, names: Any, fence: Any) -> None:
    raise sqlite3.OperationalError("the target cannot be reached")


def test_an_outage_that_is_too_long_stops_the_pipeline_each_time_and_says_what_is_gone(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # CS9
    target = str(tmp_path / "target.db")
    with monkeypatch.context() as patch:
        patch.setattr(Expiring, "commit", unreachable)
        run = start(numbering(tmp_path, 2, Expiring(target)))
        run.wait_checkpoints(2)
        run.driver.cancel(retain=True)
        run.result()
    with connect(target) as connection:
        assert connection.execute("delete from waiting").rowcount > 0  # an hour has passed
    for _ in range(2):
        again = start(numbering(tmp_path, 2, Expiring(target)))
        with pytest.raises(
            hg.PipelineFailed, match=r"sink 'out' cannot commit .* is neither prepared nor committed in"
        ):
            again.result()
        assert again.restarts == []
    with connect(target) as connection:
        assert connection.execute("select count(*) from numbers").fetchone() == (0,)


def test_a_pipeline_goes_on_without_what_is_gone_if_its_user_says_so(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what was promised is gone; the other half of the same checkpoint is not."""
    target = str(tmp_path / "target.db")
    with monkeypatch.context() as patch:
        patch.setattr(Expiring, "commit", unreachable)
        run = start(numbering(tmp_path, 2, Expiring(target)))
        run.wait_checkpoints(2)
        run.driver.cancel(retain=True)
        run.result()
    with connect(target) as connection:
        promised = connection.execute("select name, count(*) from waiting group by name order by name").fetchall()
        gone = [name for name, _ in promised[::2]]
        numbers = [
            n for name in gone for (n,) in connection.execute("select number from waiting where name = ?", [name])
        ]
        connection.executemany("delete from waiting where name = ?", [[name] for name in gone])
    again = start(numbering(tmp_path, 2, Expiring(target), on_denied_output="lose"))
    assert again.result().is_finished
    with connect(target) as connection:
        found = [n for (n,) in connection.execute("select number from numbers order by number")]
    lost = set(range(ROWS)) - set(found)
    assert len(found) == len(set(found))
    assert lost, "something that a checkpoint promised was gone"
    assert lost <= set(numbers), "and nothing else is lost"
    told = [note for note in again.notes if note.startswith("LOST: ")]
    records = list((tmp_path / "checkpoints").glob("p/lost/*.json"))
    assert len(records) == len(told) == again.driver.progress.lost_outputs
    assert all("is neither prepared nor committed" in note and "sink 'out'" in note for note in told)
