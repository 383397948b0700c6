"""Pipelines that start again, by themselves or from a savepoint, after brokers have aborted what was prepared."""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.connectors.kafka.sink_places import PATIENCE_S, Place
from tests.servers.kafka import KafkaBroker

import headgate as hg
from headgate import testing
from headgate.connectors.kafka.client import KafkaClient
from headgate.connectors.kafka.committer import KafkaCommitter
from headgate.errors import PipelineFailed, StorageError
from headgate.protocol.checkpoints.commit import CommitPermit

ROWS = 20_000

pytestmark = [pytest.mark.run, pytest.mark.xdist_group("kafka")]


class Program:
    """A pipeline as its user starts it, one time after the other. The numbers in its topic tell what was lost."""

    def __init__(self, place: Place, root: Path) -> None:
        self.place, self.root, self.name = place, root, f"p-{uuid.uuid4().hex}"

    def pipeline(self, rows: int | None = ROWS, **options: Any) -> hg.Pipeline:
        rate = 300 if rows is None else 100_000
        interval, timeout = ("1s", "12s") if self.place.sink.transaction_timeout else ("1h", "10m")
        checkpointing = hg.Checkpointing(interval=interval, timeout=timeout, dir=self.root, retained=99)
        made = hg.Pipeline(self.name, parallelism=2, checkpointing=checkpointing, restart=hg.NoRestart(), **options)
        numbers = hg.Generator({"number": hg.RowNumber()}, rows=rows, rows_per_second=rate, splits=2)
        texts = made.source(numbers, name="in").select("number", text=pl.col("number").cast(pl.String))
        texts.sink(self.place.sink, name="out")
        return made

    def run(self, **options: Any) -> Any:
        lose = {"on_denied_output": "lose"} if options.pop("lose", False) else {}
        return testing.run(self.pipeline(**lose), timeout_s=PATIENCE_S, **options)

    def write(self, handle: Any) -> None:
        """Wait until a checkpoint is committed that has records."""
        before = self.numbers().total()
        while self.numbers().total() == before:
            handle.take_checkpoint(PATIENCE_S)
            handle.wait(0)  # which raises its failure

    def die_before_a_commit(self, **options: Any) -> int:
        """Run until a checkpoint is committed, and later ones are completed and not committed; return the newest."""
        with pytest.MonkeyPatch.context() as patch, testing.running(self.pipeline(None), **options) as handle:
            self.write(handle)

            refused = []

            def commit(_: Any, permit: CommitPermit, __: Any) -> None:
                refused.append(permit)
                raise StorageError("commit at", "the broker", "it is away")

            patch.setattr(KafkaCommitter, "commit", commit)
            handle.take_checkpoint(PATIENCE_S)  # a commit of a former one that had begun goes on
            while not refused or len(self.place.open_transactions()) < 4:  # two are prepared, two are written to
                time.sleep(0.02)
            handle.cancel(retain=True)
            return int(handle.wait(PATIENCE_S).last_checkpoint)

    def chk(self, number: int) -> str:
        return str(self.root / self.name / f"chk-{number}")

    def numbers(self) -> Counter[int]:
        return Counter(row["number"] for row in self.place.read())

    def lost(self) -> list[Path]:
        return sorted((self.root / self.name / "lost").glob("*.json"))


@pytest.fixture
def program(kafka: KafkaBroker, client: KafkaClient, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    places = []

    def make(**options: Any) -> Program:
        places.append(Place(kafka, client, **options))
        return Program(places[-1], tmp_path / "checkpoints")

    yield make
    for place in places:
        place.reader.close()


EVERYTHING = Counter(range(ROWS))


def test_what_was_lost_is_said_and_given_up_when_the_user_says_so(program: Callable[..., Program]) -> None:
    """The broker itself aborts what it was asked to keep for 25 seconds."""
    here = program(transaction_timeout="25s")
    newest = here.die_before_a_commit()
    seen = here.numbers()
    while here.place.open_transactions():
        time.sleep(0.05)
    lost = "are lost: Kafka aborted transaction"
    without = re.escape("go on without it (Pipeline(..., on_denied_output='lose') in the program)")
    for _ in range(2):
        with pytest.raises(
            PipelineFailed, match=rf"[\d,]+ records for topic '.*' {lost} .* longer than 25.0 s.*{without}"
        ):
            here.run()
    with pytest.raises(PipelineFailed, match=rf"is not restored from .*/chk-{newest}: .* {lost} .*{without}"):
        here.run(restore=here.chk(newest))
    with pytest.raises(PipelineFailed) as refused:
        here.run()
    count = int(re.search(r"([\d,]+) records for topic", str(refused.value))[1].replace(",", ""))  # type: ignore[index]
    assert here.numbers() == seen
    assert here.run(lose=True).is_finished
    found = here.numbers()
    assert found.total() == ROWS - count
    assert found <= EVERYTHING
    assert len(here.lost()) > 0
    assert here.run().is_finished


def test_going_back_before_what_was_lost_writes_it_again(program: Callable[..., Program]) -> None:
    here = program()
    here.die_before_a_commit()
    here.place.lose()
    with pytest.raises(PipelineFailed, match=r"restore another checkpoint .* --go-back-past (\d+)") as refused:
        here.run()
    newest = int(re.search(r"--go-back-past (\d+)", str(refused.value))[1])  # type: ignore[index]
    assert here.run(restore=here.chk(newest - 1), go_back_past=newest).is_finished
    assert here.numbers() == EVERYTHING
    assert here.place.open_transactions() == []


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_savepoint_that_promises_what_was_lost_is_refused_until_it_is_given_up(
    program: Callable[..., Program], tmp_path: Path, elsewhere: bool
) -> None:
    """A savepoint that was made from a checkpoint promises what that did. ``elsewhere``: the directory is lost, too."""
    here = program()
    newest, place = here.die_before_a_commit(), tmp_path / "savepoint"
    hg.edit_savepoint(here.chk(newest), place).write()
    here.place.lose()
    if elsewhere:
        here.root = tmp_path / "elsewhere"
        here.place.sink.forget_owner(here.name, "out")
    for _ in range(2):
        with pytest.raises(
            PipelineFailed, match=r"are lost: Kafka aborted .* go on without it \(Pipeline\(\.\.\., on_de"
        ):
            here.run(restore=place)
    assert here.run(restore=place, lose=True).is_finished
    assert len(here.lost()) > 0
    found = here.numbers()
    assert found <= EVERYTHING
    assert here.run(restore=place).is_finished  # which goes on from its newest checkpoint
    assert here.numbers() == found


def test_a_savepoint_is_restored_again_after_a_later_run_wrote(program: Callable[..., Program], tmp_path: Path) -> None:
    """What the later run committed is there twice, as the start says; what it had only prepared is aborted."""
    here, place = program(), tmp_path / "savepoint"
    with testing.running(here.pipeline(None)) as handle:
        here.write(handle)
        assert handle.stop(savepoint=place).savepoint.savepoint == str(place)  # type: ignore[union-attr]
    before = here.numbers()
    newest = here.die_before_a_commit(restore=place)
    later = here.numbers() - before
    assert len(here.place.open_transactions()) > 0
    assert here.run(restore=place, go_back_past=newest).is_finished
    assert here.place.open_transactions() == []
    assert here.numbers() == (EVERYTHING | before | later) + later


def test_a_savepoint_is_restored_in_another_directory_after_the_first_one_was_lost(
    program: Callable[..., Program], tmp_path: Path
) -> None:
    """Its generations count from the savepoint on, and yet none of its transactional ids is of an earlier run."""
    here, place = program(), tmp_path / "savepoint"
    with testing.running(here.pipeline(None)) as handle:
        here.write(handle)
        assert handle.stop(savepoint=place).savepoint.savepoint == str(place)  # type: ignore[union-attr]
    before = here.numbers()
    here.die_before_a_commit(restore=place)
    here.die_before_a_commit()
    later = here.numbers() - before
    here.root = tmp_path / "elsewhere"
    with pytest.raises(PipelineFailed, match=r"belongs to the pipeline of the same name .* headgate sinks forget"):
        here.run(restore=place)
    here.place.sink.forget_owner(here.name, "out")
    assert here.run(restore=place).is_finished
    assert here.place.open_transactions() == []
    assert here.numbers() == (EVERYTHING | before | later) + later
