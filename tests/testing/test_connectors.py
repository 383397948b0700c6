from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors.base import SourceContext
from headgate.errors import UsageError
from headgate.testing import EOF, PAUSE, FailOnce, ScriptedSource, check_source, run
from headgate.testing.connectors import ScriptedFailure

SCHEMA = {"n": pa.int64()}


def test_a_script_passes_the_conformance_kit() -> None:
    source = ScriptedSource(
        [{"n": 1}, [{"n": 2}, {"n": 3}], PAUSE, {"n": 4}, EOF], [{"n": 5}, EOF], schema=SCHEMA, pause_ms=0
    )
    assert sorted(row["n"] for row in check_source(source)) == [1, 2, 3, 4, 5]


def test_it_fails_once_at_the_same_place(tmp_path: Path) -> None:
    source = ScriptedSource([{"n": 1}, FailOnce(tmp_path / "failed"), {"n": 2}, EOF], schema=SCHEMA)
    first = source.open(SourceContext("p", "s", 0, 1, None))
    assert first.poll() is not None
    with pytest.raises(ScriptedFailure, match="split 0 fails at item 1"):
        first.poll()
    second = source.open(SourceContext("p", "s", 0, 1, first.positions()))
    rows = []
    while not second.is_finished():
        batch = second.poll()
        rows += batch.batch.to_pylist() if batch is not None else []
    assert rows == [{"n": 2}]


def test_a_script_without_eof_never_ends() -> None:
    reader = ScriptedSource([{"n": 1}], schema=SCHEMA).open(SourceContext("p", "s", 0, 1, None))
    reader.poll()
    assert reader.poll() is None
    assert not reader.is_finished()


def test_nothing_follows_eof() -> None:
    with pytest.raises(UsageError, match="goes on after EOF"):
        ScriptedSource([EOF, {"n": 1}], schema=SCHEMA)


pytest_plugins = ["pytester"]

TESTS = """
import contextlib
import threading
import time

import pytest

import headgate as hg
from headgate.testing import EOF, PAUSE, ScriptedSource

SCHEMA = {"word": str, "n": int}
ONES = [{"word": "ab"[n % 2], "n": 1} for n in range(40)]

def totals(source, sink):
    p = hg.Pipeline("totals", parallelism=2, checkpointing=hg.Checkpointing(interval="20ms"))
    add = lambda total, row: {**total, "n": total["n"] + row["n"]}
    p.source(source).key_by("word").reduce(add).sink(sink)
    return p

def scripted(*items):
    return ScriptedSource(items, schema=SCHEMA, pause_ms=30)

def counted(sink):
    return sorted((row["word"], row["n"]) for row in sink.rows())

ONCE = sorted((word, n + 1) for word in "ab" for n in range(20))

@pytest.mark.parametrize("parallelism", [1, 3])
def test_once(headgate_run, headgate_collect, parallelism):
    sink = headgate_collect()
    result = headgate_run(totals(hg.FromRows(ONES), sink), parallelism=parallelism)
    assert result.is_finished
    assert counted(sink) == ONCE

def test_lost_workers(headgate_run, headgate_collect):
    for pauses_count in (20, 200, 1_000):
        sink = headgate_collect()
        source = scripted(ONES[:20], *[PAUSE] * pauses_count, ONES[20:], EOF)
        with contextlib.suppress(hg.UsageError):  # there were not two checkpoints meanwhile: the machine is slow
            result = headgate_run(totals(source, sink), kill_worker_after_checkpoint=(1, 2))
            break
    assert result.restarts == 2
    assert counted(sink) == ONCE

handles = []

def test_goes_on(headgate_run, headgate_start, headgate_collect, headgate_directory):
    sink, kept = headgate_collect(), headgate_directory / "checkpoints"
    handle = headgate_start(totals(scripted(ONES[:20], PAUSE), sink), checkpoint_dir=kept)
    handle.stop()
    assert headgate_run(totals(scripted(ONES[:20], PAUSE, ONES[20:], EOF), sink), checkpoint_dir=kept).is_finished
    assert counted(sink) == ONCE

def test_leaves_it_running(headgate_start):
    handles.append(headgate_start(totals(scripted(PAUSE), hg.Discard())))

def test_is_cancelled():
    deadline = time.monotonic() + 300
    while any(t.name.startswith("headgate-worker") for t in threading.enumerate()):
        assert time.monotonic() < deadline
    assert handles[0].progress.state.has_ended

def through_a_stream(store, run, sink):
    source = hg.Pipeline("in", parallelism=1)
    source.source(hg.FromRows(ONES)).sink(hg.StreamSink("app/words"))
    run(source)
    assert [stream.name for stream in store.list_streams()] == ["app/words"]
    back = hg.Pipeline("back", parallelism=1)
    back.source(hg.StreamSource("app/words", follow=False)).sink(sink)
    run(back)
    assert len(sink.rows()) == len(ONES)

def test_one(headgate_store, headgate_run, headgate_collect):
    through_a_stream(headgate_store, headgate_run, headgate_collect())

def test_another(headgate_store, headgate_run, headgate_collect):
    through_a_stream(headgate_store, headgate_run, headgate_collect())

def test_too_long(headgate_run):
    with pytest.raises(TimeoutError, match="after 0.2 s"):
        headgate_run(totals(scripted(PAUSE), hg.Discard()), timeout_s=0.2)
"""


def test_the_fixtures_do_what_they_say(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    patient = ("-o", "headgate_timeout_s=300")
    result = pytester.runpytest_subprocess("-p", "no:randomly", "-p", "no:cacheprovider", "-q", *patient)
    result.assert_outcomes(passed=9)


def test_a_project_says_how_long_a_pipeline_may_take(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(headgate_run): pass")
    pytester.makeini("[pytest]\nheadgate_timeout_s = soon")
    result = pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*headgate_timeout_s must be a number of seconds above zero, but is 'soon'*"])


def test_pytest_starts_without_anything_heavy() -> None:
    plugin = "import sys, pytest; before = set(sys.modules); import headgate.testing.plugin"
    listing = f"{plugin}; print(*set(sys.modules) - before)"
    told = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    brought = set(told.stdout.split())
    assert {name for name in brought if name.startswith("headgate")} == {
        "headgate",
        "headgate.dataclass",
        "headgate.errors",
        "headgate.plain_text",
        "headgate.public_names",
        "headgate.tracebacks",
        "headgate.testing",
        "headgate.testing.plugin",
    }
    heavy = {"pyspark", "pyarrow", "polars", "numpy", "pandas", "sqlalchemy", "asyncio", "typer", "psutil"}
    assert brought.isdisjoint(heavy)


def test_headgate_does_not_need_pytest() -> None:
    without = "import sys; sys.modules['pytest'] = None; import headgate.testing; headgate.testing.run"
    subprocess.run([sys.executable, "-c", without], check=True)


def test_delays_of_restarts_are_short(tmp_path: Path) -> None:
    from headgate.testing import EOF, PAUSE, FailOnce, ScriptedSource

    script = [[{"n": 1}], PAUSE, FailOnce(tmp_path / "failed"), EOF]
    p = hg.Pipeline("p", parallelism=1, restart=hg.FixedDelay(delay="1h"))
    p.source(ScriptedSource(script, schema={"n": int}, pause_ms=10)).sink(hg.Discard())
    assert run(p).restarts == 1


@pytest.mark.parametrize("kills", [0, True, (1, 0), ("1",)])
def test_a_wrong_checkpoint_to_lose_a_worker_behind_is_refused(kills: object) -> None:
    p = hg.Pipeline("p", parallelism=1)
    p.source(hg.FromRows([{"n": 1}])).sink(hg.Discard())
    with pytest.raises(hg.UsageError, match="kill_worker_after_checkpoint must be 1 or more"):
        run(p, kill_worker_after_checkpoint=kills)  # type: ignore[arg-type]
