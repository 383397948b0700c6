"""The first record of a local run: from the command ``headgate run`` to the first record that a worker processes.

Each start is a process of its own, as a user's. The program notes when it is loaded, and has the driver note when it
has a context and when it hands the job to Spark; an operator notes in its worker when the worker has loaded the
pipeline and when its first records come. Starts with the file of ``headgate prepare`` and without it take turns.
Settings: ``starts`` (of each kind).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from bench.harness import Options, Result, at_most, median

NAME = "first_record"

FIRST_RECORD_S_MAX = 3.0
START_TIMEOUT_S = 240.0
LOOK_S = 0.02

PROGRAM = "from bench.first_record import noted_pipeline\npipeline = noted_pipeline()\n"
MARKS = "HEADGATE_BENCH_MARKS"
PROCESSES = ("driver", "jvm", "workers")
STEPS = ("program", "context", "submitted", "worker", "first_record")
COMMAND = [sys.executable, "-P", "-m", "headgate.cli.__main__"]


def run(options: Options) -> Result:
    """Start in turns, without and with the file of classes; return the median of each step."""
    starts = int(options.number("starts", 7, quick=2))
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        places = {kind: Path(directory) / kind for kind in ("plain", "prepared")}
        environments = {kind: _environment(place) for kind, place in places.items()}
        subprocess.run([*COMMAND, "prepare"], env=environments["prepared"], stdout=sys.stderr, check=True)
        for kind, place in places.items():
            _start(place / "first", environments[kind])  # it writes the bytecode
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in places}
        for number in range(starts):
            for kind, place in places.items():
                found[kind].append(_start(place / str(number), environments[kind]))
    figures: dict[str, Any] = {}
    for kind, measured in found.items():
        figures[f"{kind}_s_median"] = median([one["total"] for one in measured])
        figures[f"{kind}_s_max"] = max(one["total"] for one in measured)
        figures[f"{kind}_cpu_s_median"] = median([one["cpu"] for one in measured])
        figures[f"{kind}_cpu_s_of"] = {one: median([start[f"cpu_{one}"] for start in measured]) for one in PROCESSES}
        figures[f"{kind}_steps_s_median"] = {step: median([one[step] for one in measured]) for step in STEPS}
    targets = {f"{kind}_s_median": at_most(FIRST_RECORD_S_MAX) for kind in found}
    return Result({**figures, "starts": found}, targets)


def _environment(place: Path) -> dict[str, str]:
    """Return that of a user who has a home at ``place``, and no settings of Spark."""
    place.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADGATE_", "SPARK_"))}
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, str(Path(root) / "src")])
    kept["HEADGATE_PREPARE"] = "never"
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    kept["PYTHONPYCACHEPREFIX"] = str(place / "bytecode")
    homes = {"XDG_CACHE_HOME": str(place / "cache"), "XDG_STATE_HOME": str(place / "state"), "TMPDIR": str(place)}
    return {**kept, **homes, "PYTHONPATH": path}


def _start(place: Path, environment: dict[str, str]) -> dict[str, float]:
    """Start once; return the seconds that each step took, all of them, and their processor time."""
    place.mkdir()
    (place / "program.py").write_text(PROGRAM)
    marks = place / "marks"
    command = [*COMMAND, "run", "program.py", "--quiet", "--dir", str(place / "checkpoints")]
    begun_s = time.monotonic()
    process = subprocess.Popen(command, cwd=place, env={**environment, MARKS: str(marks)})
    try:
        times = _wait(process, marks)
        cpu_s = _cpu_seconds_of(process.pid)
    finally:
        _end(process)
    steps, before_s = {}, begun_s
    for step in STEPS:
        steps[step], before_s = times[step] - before_s, times[step]
    by_process = {f"cpu_{one}": cpu_s[one] for one in PROCESSES}
    return {"total": times[STEPS[-1]] - begun_s, "cpu": sum(cpu_s.values())} | by_process | steps


def _cpu_seconds_of(pid: int) -> dict[str, float]:
    """Return the processor time of the driver, the JVM, and the process from which workers are forked with those."""
    found = dict.fromkeys(PROCESSES, 0.0)
    for process in [driver := psutil.Process(pid), *driver.children(recursive=True)]:
        with suppress(psutil.Error):  # it ended
            is_jvm, times = process.name() == "java", process.cpu_times()
            kind = "driver" if process.pid == pid else "jvm" if is_jvm else "workers"
            found[kind] += times.user + times.system
    return found


def _wait(process: subprocess.Popen[bytes], marks: Path) -> dict[str, float]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        times = _noted(marks)
        if STEPS[-1] in times:
            return times
        time.sleep(LOOK_S)
    raise RuntimeError(f"no record came within {START_TIMEOUT_S:g} s; reached: {list(_noted(marks))}")


def _noted(marks: Path) -> dict[str, float]:
    """Return when each step was reached first, in seconds of this machine's monotonic clock."""
    times: dict[str, float] = {}
    for line in marks.read_text().splitlines() if marks.exists() else []:
        step, at_s = json.loads(line)
        times.setdefault(step, at_s)
    return times


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the run; what it has started ends with it."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    _, alive = psutil.wait_procs(children, START_TIMEOUT_S)
    for left in alive:
        left.kill()


# -- in the command, and in its workers ------------------------------------------------------------------------


def note(step: str) -> None:
    """Note that ``step`` is reached now. One short line is written in one piece."""
    with open(os.environ[MARKS], "a") as marks:
        marks.write(json.dumps([step, time.monotonic()]) + "\n")


def noted_pipeline() -> Any:
    """Return a pipeline whose start is noted: the program is loaded now."""
    import headgate as hg
    from headgate.spark import launcher, session

    _note_after(session, "make_context", "context")
    _note_after(launcher.SparkLauncher, "submit", "submitted")
    pipeline = hg.Pipeline("first-record", parallelism=2, checkpointing=hg.Checkpointing("1s"))
    columns: dict[str, Any] = {"n": hg.RowNumber(), "key": hg.Uniform(0, 100)}
    rows = pipeline.source(hg.Generator(columns=columns, rows_per_second=1_000, splits=2, batch_rows=100))
    rows.map_batches(Noting(), schema={"n": int, "key": int}, as_arrow=True).sink(hg.Discard())
    note("program")
    return pipeline


def _note_after(owner: Any, name: str, step: str) -> None:
    call: Callable[..., Any] = getattr(owner, name)

    def noted(*given: Any, **options: Any) -> Any:
        found = call(*given, **options)
        note(step)
        return found

    setattr(owner, name, noted)


class Noting:
    """A function that passes batches on, and notes the first one; and when it came into its worker."""

    def __init__(self) -> None:
        self._is_first = True

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, ()

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._is_first:
            self._is_first = False
            note("first_record")
        return batch


def _arrived() -> Noting:
    note("worker")
    return Noting()
