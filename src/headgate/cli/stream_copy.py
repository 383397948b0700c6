"""``headgate streams copy`` between a stream of the store and one of another system: see ``api.stream_copy``.

Only a copy imports it, as it needs the clients of these systems.
"""

from __future__ import annotations

import threading
import tomllib
from pathlib import Path

from headgate.api.foreground import run_to_end
from headgate.api.stream_copy import Direction, PravegaCopy, StreamCopy, TopicCopy
from headgate.cli.options import RunOptions, StartPoint
from headgate.cli.run import terminal_observer
from headgate.cli.store import ELSEWHERE, PRAVEGA, TOPIC, print_result, refuse
from headgate.connectors.kafka.connection import NO_SECURITY, KafkaSecurity
from headgate.errors import UsageError
from headgate.model.progress import PipelineHandle
from headgate.spark.jvm import quick_jvm


def copy_with(
    name: str,
    target: str,
    store: str,
    copy_name: str,
    *,
    brokers: str,
    security: Path | None,
    partitions: int,
    controller: str,
    segments: int,
) -> StreamCopy:
    """Return the copy from ``name`` to ``target``, one of which is in another system.

    Raises:
        UsageError: both are, or options are missing or for something else.
    """
    there, *others = (one for one in (name, target) if one.startswith(ELSEWHERE))
    if others:
        raise UsageError(f"a copy is between a stream of the store and {there}; use a pipeline to {others[0]}")
    direction: Direction = "to-stream" if there is name else "from-stream"
    stream = target if there is name else name
    if there.startswith(TOPIC):
        refuse({"--controller": controller, "--segments": segments}, "for copies to or from Pravega")
        if not brokers:
            raise UsageError(f"a copy with {there} needs --brokers HOST:PORT")
        login = NO_SECURITY if security is None else read_security(security)
        topic = there.removeprefix(TOPIC)
        return TopicCopy(direction, topic, stream, brokers, store, partitions, login, copy_name)
    refuse({"--brokers": brokers, "--partitions": partitions}, "for copies to or from Kafka")
    if not controller:
        raise UsageError(f"a copy with {there} needs --controller HOST:PORT")
    return PravegaCopy(direction, there.removeprefix(PRAVEGA), stream, controller, store, segments, copy_name)


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
    copy: StreamCopy,
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
    # an interrupted one needs what its stream retains for it
    if done := any(found) or result.is_finished:
        copy.release()
    source, target = copy.stream, copy.other
    if copy.direction == "to-stream":
        source, target = target, copy.stream
    rest = "" if done else "; interrupted: the same command goes on"
    text = f"{result.records_in:,} records of {source} are in {target}{rest}"
    facts = {"pipeline": pipeline.name, "records": result.records_in, "is_complete": done}
    print_result(text, facts, as_json=as_json)
