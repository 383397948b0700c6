"""What a run says that was cancelled, or whose pipeline had finished before."""

from __future__ import annotations

from pathlib import Path

import pytest

import headgate as hg
from headgate import testing
from headgate.cli.output import result_text
from headgate.cli.progress import outcome_of
from headgate.display.progress import end_text
from headgate.errors import PipelineFailed
from headgate.model.progress import SilentObserver
from headgate.spark import session

ENDLESS = 10_000_000


def pipeline(root: Path, rows: int = 40) -> hg.Pipeline:
    checkpointing = hg.Checkpointing(interval="20ms", dir=root / "checkpoints")
    p = hg.Pipeline("p", parallelism=2, checkpointing=checkpointing)
    rate = 1_000 if rows == ENDLESS else None
    source = p.source(hg.Generator({"n": hg.Uniform(0, 9)}, rows=rows, rows_per_second=rate), name="in")
    source.sink(hg.FileSink(root / "out", roll_interval=0), name="out")
    return p


class Notes(SilentObserver):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_note(self, text: str) -> None:
        self.texts.append(str(text))


def no_session(*_: object, **__: object) -> None:
    raise AssertionError("Spark is asked for")


def test_a_pipeline_that_has_finished_says_so_without_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = testing.run(pipeline(tmp_path))
    assert not first.had_finished
    for name in ("find_session", "make_session", "ensure_jvm"):
        monkeypatch.setattr(session, name, no_session)
    notes = Notes()
    handle = pipeline(tmp_path).start(observer=notes)
    again = handle.wait(60)
    assert again is not None
    assert (again.is_finished, again.had_finished, again.records_in) == (True, True, 40)
    assert again.last_checkpoint == first.last_checkpoint
    assert result_text(again) == "nothing to do: it had finished before, after 40 records in, 40 out"
    assert end_text(again) == "it had finished before"
    assert any("has already processed all its input" in text for text in notes.texts)


def test_a_damaged_end_is_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether anything is left to do decides the claim, with workers if need be."""
    testing.run(pipeline(tmp_path))
    newest = max((tmp_path / "checkpoints" / "p" / "log").iterdir())
    newest.write_bytes(newest.read_bytes()[:-3])
    monkeypatch.setattr(session, "find_session", no_session)
    with pytest.raises(PipelineFailed, match="Spark is asked for"):
        pipeline(tmp_path).start()


def test_a_cancelled_run_says_that_it_was_cancelled(tmp_path: Path) -> None:
    with testing.running(pipeline(tmp_path, ENDLESS)) as handle:
        while (taken := handle.take_checkpoint()) is None or taken.checkpoint is None:
            pass
        handle.cancel()
        result = handle.wait(60)
    assert result is not None
    assert result.is_cancelled
    text = f"cancelled; the same command continues from checkpoint {result.last_checkpoint} after "
    assert result_text(result).startswith(text)
    assert end_text(result) == f"cancelled; the next run continues from checkpoint {result.last_checkpoint}"
    assert outcome_of(result) == "cancelled"
    with testing.running(pipeline(tmp_path, ENDLESS)) as handle:
        stopped = handle.stop()
    assert stopped is not None
    assert not stopped.is_cancelled
