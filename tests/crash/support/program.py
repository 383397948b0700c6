"""The process under test: runs pipelines as a user's program would, and tells what happens as JSON lines.

``program.py SPEC`` runs one pipeline in the foreground and ends with the exit code of the command line.
``program.py SLOTS`` makes a SparkSession, then runs every spec that comes in on standard input, one thread each.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from typing import Any

from crash.support import loop_pipelines, pipelines
from headgate.api.foreground import run_to_end
from headgate.cli.output import report_error
from headgate.errors import HeadgateError, UsageError

LOOK_S = 0.02
BUILDERS = {**pipelines.BUILDERS, **loop_pipelines.BUILDERS}
_output = threading.Lock()


def tell(run: str, event: str, **fields: Any) -> None:
    line = json.dumps({"run": run, "event": event, **fields}, default=str)
    with _output:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


class Teller:
    """Tells what an observer sees."""

    def __init__(self, run: str) -> None:
        self.run = run

    def on_progress(self, progress: Any) -> None:
        tell(self.run, "progress", state=progress.state.value, bad_records=progress.bad_records)

    def on_restart(self, reason: str, delay_ms: int) -> None:
        tell(self.run, "restart", reason=reason, delay_ms=delay_ms)

    def on_note(self, text: str) -> None:
        tell(self.run, "note", text=text)

    def on_checkpoint(self, checkpoint: int, duration_ms: int, size_bytes: int) -> None:
        tell(self.run, "checkpoint", checkpoint=checkpoint, duration_ms=duration_ms)


def watch(run: str, handle: Any) -> None:
    """Tell the generation and its workers whenever they change."""
    driver, before = handle.driver, None
    while not driver.result.done():
        now = (driver.running_generation, driver.worker_pids())
        if now != before and now[0] is not None and len(now[1]) > 0:
            before = now
            tell(run, "running", generation=now[0], workers=now[1], at=time.monotonic())
        time.sleep(LOOK_S)


def start(spec: dict[str, Any], spark: Any) -> Any:
    pipeline = BUILDERS[spec["pipeline"]](spec)
    if "machines" in spec:
        from crash.support.placed import start_placed

        handle = start_placed(spec, pipeline, Teller(spec["name"]))
    else:
        handle = pipeline.start(spec.get("master"), spark=spark, observer=Teller(spec["name"]))
    threading.Thread(target=watch, args=(spec["name"], handle), daemon=True).start()
    return handle


def result_fields(result: Any) -> dict[str, Any]:
    return {
        "is_finished": result.is_finished,
        "restarts": result.restarts,
        "last_checkpoint": result.last_checkpoint,
        "records_in": result.records_in,
        "records_out": result.records_out,
        "is_drained": result.is_drained,
    }


def run_one(spec: dict[str, Any]) -> int:
    try:
        result = run_to_end(lambda: start(spec, None))
    except HeadgateError as error:
        tell(spec["name"], "failed", error=str(error), kind=type(error).__name__)
        return report_error(error)
    tell(spec["name"], "result", **result_fields(result))
    return 0


class Host:
    """Runs many pipelines in one SparkSession."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.handles: dict[str, Any] = {}

    def serve(self) -> None:
        tell("", "host")
        for line in sys.stdin:
            command = json.loads(line)
            if "drain" in command:
                threading.Thread(
                    target=self.handles[command["drain"]].stop, kwargs={"drain": True}, daemon=True
                ).start()
            elif "stop" in command:
                threading.Thread(target=self.handles[command["stop"]].stop, daemon=True).start()
            else:
                threading.Thread(target=self.run, args=(command,), daemon=True).start()
        self.session.stop()

    def run(self, spec: dict[str, Any]) -> None:
        environment = self.session.sparkContext.environment
        name = spec["name"]
        environment.pop("HEADGATE_KILL_AT", None)
        if "kill_at" in spec:
            environment["HEADGATE_KILL_AT"] = spec["kill_at"]
        try:
            if spec["pipeline"] in ACTIONS:
                tell(name, "result", **ACTIONS[spec["pipeline"]](spec, self.session))
                return
            handle = self.handles[name] = start(spec, self.session)
            tell(name, "result", **result_fields(handle.wait()))
        except HeadgateError as error:
            tell(name, "failed", error=str(error), kind=type(error).__name__, is_usage=isinstance(error, UsageError))
        except BaseException as error:
            traceback.print_exc()
            tell(name, "failed", error=str(error), kind=type(error).__name__)


def dataframes(spec: dict[str, Any], session: Any) -> dict[str, Any]:
    """A DataFrame in, a DataFrame out."""
    import polars as pl

    import headgate as hg

    frame = session.range(1_000).selectExpr("id", "id % 7 AS key", "cast(id AS string) AS text")
    pipeline = pipelines.make(spec)
    stream = pipeline.source(hg.DataFrameSource(frame)).filter(pl.col("key") != 3)
    found = stream.to_dataframe(session)
    rows = sorted(tuple(row) for row in found.collect())
    return {"columns": found.columns, "rows": rows}


ACTIONS = {"dataframes": dataframes}


def main() -> None:
    argument = sys.argv[1]
    if not argument.isdigit():
        begin_zygote = getattr(sys.modules.get("sitecustomize"), "begin_zygote", None)
        if begin_zygote is not None and "machines" not in argument:  # workers are forked from this process
            begin_zygote()
        sys.exit(run_one(json.loads(argument)))
    from pyspark.sql import SparkSession

    from headgate.spark.session import make_context

    Host(SparkSession(make_context("tests", int(argument), None))).serve()


if __name__ == "__main__":
    main()
