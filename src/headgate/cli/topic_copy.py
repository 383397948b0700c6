"""``headgate streams copy`` between a stream and a topic of Kafka: runs the pipeline of ``api.topic_copy``."""

from __future__ import annotations

import threading
import tomllib
from pathlib import Path

from headgate.api.foreground import run_to_end
from headgate.api.topic_copy import TopicCopy
from headgate.cli.options import RunOptions, StartPoint
from headgate.cli.run import terminal_observer
from headgate.cli.store import print_result
from headgate.connectors.kafka.security import KafkaSecurity
from headgate.errors import UsageError
from headgate.model.progress import PipelineHandle
from headgate.spark.jvm import quick_jvm


def read_security(path: Path) -> KafkaSecurity:
    """Return the security options in a TOML file.

    Raises:
        UsageError: it cannot be read, or has other options.
    """
    where = f"--kafka-security {path}"
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{where} is not TOML: {error}") from error
    known = KafkaSecurity.__dataclass_fields__
    if not found.keys() <= known.keys():
        raise UsageError(f"{where} must have no other options than {', '.join(known)}")
    return KafkaSecurity(**found)


def run(
    copy: TopicCopy,
    checkpoint_dir: str | None,
    master: str | None,
    parallelism: int | None,
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run the copy until it has what was there when it began, and say how many records that makes."""
    options = RunOptions(
        *(master, parallelism, checkpoint_dir, StartPoint(None, None, ()), quiet or as_json),
        as_json=False,
        supervised=False,
        standby=False,
        restart=None,
    )
    pipeline = copy.pipeline()
    pipeline.override(parallelism=parallelism, checkpoint_dir=checkpoint_dir)
    root, end = pipeline.definition_on(master).config.checkpoint_root, copy.end()
    found: list[bool] = []
    watchers: list[threading.Thread] = []

    def started(handle: PipelineHandle) -> None:
        watch = threading.Thread(
            target=lambda: found.append(copy.stop_at(end, handle, root)), name="headgate-copy", daemon=True
        )
        watchers.append(watch)
        watch.start()

    with terminal_observer(pipeline, options) as observer, quick_jvm():

        def start() -> PipelineHandle:
            handle = pipeline.start(master, observer=observer)
            observer.on_start(handle)
            return handle

        result = run_to_end(start, started)
    for watch in watchers:
        watch.join()
    if done := any(found) or result.is_finished:
        copy.release()
    source, target = copy.stream, f"topic {copy.topic}"
    if copy.direction == "to-stream":
        source, target = target, copy.stream
    rest = "" if done else "; interrupted: the same command goes on"
    text = f"{result.records_in:,} records of {source} are in {target}{rest}"
    facts = {"pipeline": pipeline.name, "records": result.records_in, "is_complete": done}
    print_result(text, facts, as_json=as_json)
