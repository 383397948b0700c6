"""The demo: the main job on real log lines, with a worker and then the driver killed while it runs.

    make demo                            on the log that Spark itself writes meanwhile
    make demo LOGS="a.log b.log"         on log files

It counts lines per level and service in windows of 5 s. A healthy Spark logs few errors, so the demo counts all
levels but TRACE. At the end the committed counts are compared with a plain recount of the very same lines. The last
line says how many were lost and how many duplicated; the exit code is 1 unless both are 0.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC
from pathlib import Path
from typing import TypeVar

import polars as pl
from feeder import Feeder
from processes import PipelineProcess, kill, start_pipeline, start_workload
from recount import Key, Recount, lines_of, recount
from replay import Replay, disorder_s, merged

import headgate as hg
from headgate.store.streams import TEXT_SCHEMA

LEVELS = "DEBUG,INFO,WARN,ERROR,FATAL"
WINDOW_S = 5
LINES_WANTED = 100_000
LINES_BEFORE_KILL = 5_000
LIVE_LIMIT_S = 75.0
"""Since the start: then the log is long enough, however slow the machine."""
STEP_LIMIT_S = 300.0
SEGMENTS = 2

T = TypeVar("T")


class DemoError(Exception):
    """Something did not happen in time, or a process ended when it should not have."""


class Demo:
    """One run of the demo in the directory ``root``."""

    def __init__(self, root: Path, logs: list[Path]) -> None:
        self.root, self.logs = root, logs
        self.began_s = time.monotonic()
        self.store = hg.Store.open(root / "store")
        self.store.create_stream("app/logs", TEXT_SCHEMA, segments=SEGMENTS)
        self.feeder = Feeder(self.store, "app/logs")
        self.replay: Replay | None = None
        self.workload: subprocess.Popen[bytes] | None = None
        self.options = ["--levels", LEVELS, "--window", f"{WINDOW_S}s"]
        self.lines: list[str] = []
        self.driver_log: Path | None = None
        self.pipeline: PipelineProcess | None = None

    def say(self, text: str) -> None:
        """Print with the time since the start."""
        print(f"[{time.monotonic() - self.began_s:5.1f} s] {text}", flush=True)

    def run(self) -> bool:
        """Run it all; return whether the counts are right."""
        self._begin_input()
        self.pipeline = pipeline = self._start()
        if not self.logs:
            self._until(lambda: pipeline.checkpoints_count(0) >= 1, "its first checkpoint")
            workload_log = self.root / "workload-spark.log"
            self.feeder.follow(workload_log)
            self.workload = start_workload(self.root, workload_log)
            self._until(lambda: self.feeder.lines_count > LINES_BEFORE_KILL, "lines of Spark's log")
        self._until(lambda: pipeline.checkpoints_count(0) >= 2 and pipeline.when_processing(0, 1), "it processes")
        self.say("the pipeline runs: records flow and checkpoints complete")
        self._kill_worker(pipeline)
        self.pipeline = pipeline = self._kill_driver(pipeline)
        self._end_input()
        self.say(f"the input is complete and sealed: {self.feeder.lines_count:,} lines")
        code = pipeline.wait(STEP_LIMIT_S)
        if code != 0:
            raise DemoError(f"the pipeline ended with exit code {code}:\n{pipeline.last_errors()}")
        return self._compare()

    def close(self) -> None:
        """Leave nothing running."""
        if self.pipeline is not None:
            self.pipeline.terminate()
        self._stop_workload()
        self.store.close()

    def _begin_input(self) -> None:
        if self.logs:
            self.lines = merged(self.logs)
            self.options += ["--out-of-orderness", f"{max(5, disorder_s(self.lines))}s"]
            self.say(f"the input: {len(self.lines):,} lines of {', '.join(path.name for path in self.logs)}")
            self.replay = Replay(self.feeder, self.lines)
            self.replay.start()
            return
        self.say("the input: the log that Spark writes on this machine from now on")
        self.driver_log = self.root / "pipeline-spark.log"
        self.feeder.follow(self.driver_log)
        self.feeder.start()

    def _start(self) -> PipelineProcess:
        pipeline = start_pipeline(self.root, self.options, self.driver_log)
        self.say(f"started the pipeline at parallelism 2: process {pipeline.pid}")
        page = self._until(pipeline.page, "the address of its page", pipeline)
        self.say(f"look at it in a browser while it runs: {page}")
        return pipeline

    def _kill_worker(self, pipeline: PipelineProcess) -> None:
        victim = self._until(pipeline.worker_pids, "worker processes")[-1]
        progress = pipeline.last_progress()
        generation = 1 if progress is None else progress["generation"]
        killed_s = time.monotonic()
        kill(victim)
        self.say(f"killed a worker with SIGKILL: process {victim}, in generation {generation}")
        back_s = self._until(lambda: pipeline.when_processing(killed_s, generation + 1), "the worker's recovery")
        self.say(f"recovered from the worker's death: records flow again {back_s - killed_s:.1f} s after the kill")
        self._until(lambda: pipeline.checkpoints_count(back_s) >= 2, "checkpoints after the recovery")

    def _kill_driver(self, pipeline: PipelineProcess) -> PipelineProcess:
        killed_s = time.monotonic()
        pipeline.kill_driver()
        self.say(f"killed the driver with SIGKILL: process {pipeline.pid}; starting the same command again")
        following = self._start()
        self.pipeline = following
        back_s = self._until(lambda: following.when_processing(killed_s, 1), "the driver's recovery", following)
        self.say(f"recovered from the driver's death: records flow again {back_s - killed_s:.1f} s after the kill")
        self._until(lambda: following.checkpoints_count(back_s) >= 1, "a checkpoint after the recovery", following)
        return following

    def _end_input(self) -> None:
        if self.replay is not None:
            self.replay.release()
            self.replay.join()
        else:
            deadline = self.began_s + LIVE_LIMIT_S
            while self.feeder.lines_count < LINES_WANTED and time.monotonic() < deadline:
                time.sleep(0.1)
            self._stop_workload()
            self.feeder.finish()
            for path, size_bytes in self.feeder.fed_bytes().items():
                if path.exists():
                    self.lines += lines_of(path, size_bytes)
        self.store.seal("app/logs")

    def _stop_workload(self) -> None:
        if self.workload is not None and self.workload.poll() is None:
            (self.root / "stop-workload").touch()
            try:
                self.workload.wait(5)
            except subprocess.TimeoutExpired:
                self.workload.kill()
                self.workload.wait()

    def _compare(self) -> bool:
        expected = recount(self.lines, frozenset(LEVELS.split(",")), WINDOW_S)
        found = committed_counts(self.store)
        unparsed = self.store.describe("app/unparsed").events_count
        lost, duplicated = differences(expected, found, unparsed)
        self.say(
            f"{len(self.lines):,} lines went through: {expected.counts.total():,} counted under {len(found):,} keys "
            f"and windows, {expected.filtered:,} of other levels, {unparsed:,} that are no log lines set aside"
        )
        print(f"{lost} lost, {duplicated} duplicated", flush=True)
        return lost == duplicated == 0

    def _until(self, condition: Callable[[], T | None], what: str, watched: PipelineProcess | None = None) -> T:
        deadline = time.monotonic() + STEP_LIMIT_S
        pipeline = watched or self.pipeline
        while time.monotonic() < deadline:
            value = condition()
            if value:
                return value
            if pipeline is not None and pipeline.exit_code is not None:
                raise DemoError(f"the pipeline ended too early (waiting for: {what}):\n{pipeline.last_errors()}")
            time.sleep(0.02)
        errors = "" if pipeline is None else f"\n{pipeline.last_errors()}"
        raise DemoError(f"waited {STEP_LIMIT_S:.0f} s in vain for: {what}{errors}")


def committed_counts(store: hg.Store) -> Counter[Key]:
    """Return the counts that the pipeline committed; several rows of one key add up, so that duplicates show."""
    found: Counter[Key] = Counter()
    stream = store.describe("app/error-counts")
    for segment in range(stream.segments_count):
        reader = store.reader("app/error-counts", segment)
        while (batch := reader.read()) is not None:
            for row in pl.from_arrow(batch).to_dicts():
                start_s = int(row["window_start"].replace(tzinfo=UTC).timestamp())
                found[row["level"], row["service"], start_s] += row["lines"]
    return found


def differences(expected: Recount, found: Counter[Key], unparsed: int) -> tuple[int, int]:
    """Return how many lines the pipeline lost and how many it counted too often."""
    lost = (expected.counts - found).total() + max(0, expected.unparsed - unparsed)
    duplicated = (found - expected.counts).total() + max(0, unparsed - expected.unparsed)
    return lost, duplicated


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(prog="make demo", description="Kill a running pipeline; compare its counts.")
    parser.add_argument("--logs", nargs="+", type=Path, default=[], help="log files; default: Spark's own log")
    parser.add_argument("--keep", action="store_true", help="keep the demo's directory")
    options = parser.parse_args()
    missing = [str(path) for path in options.logs if not path.is_file()]
    if missing:
        parser.error(f"there is no file {', '.join(missing)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left running
    root = Path(tempfile.mkdtemp(prefix="headgate-demo-"))
    demo = Demo(root, options.logs)
    try:
        return 0 if demo.run() else 1
    except (DemoError, hg.HeadgateError, subprocess.TimeoutExpired) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    finally:
        demo.close()
        if options.keep:
            print(f"kept {root}", file=sys.stderr)
        else:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
