"""Runs a peer as a process of its own and reads its result: one JSON object on the last line it prints.

A process per measurement gives every peer a fresh JVM, and whatever the peer leaves running ends with its process
group. A peer that is not installed is a result (``NotInstalled``), not an error: the benchmark goes on without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.install import (
    KAFKA_ENVIRONMENT,
    PATHWAY_ENVIRONMENT,
    ROOT,
    broker_of,
    environment_python,
    flink_connector,
    flink_parquet,
    streaming_connector,
)

TIMEOUT_SECONDS = 900
"""Longer than any sweep; a peer that hangs must not hang the benchmark."""

KEYED_UPDATE_TIMEOUT_SECONDS = 7_200
"""Filling tens of millions of keys takes minutes, and so does each size."""

OUTPUT_LINES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class NotInstalled:
    """The peer cannot run here; ``reason`` is one sentence that says what to do."""

    reason: str


class PeerFailedError(RuntimeError):
    """A peer is installed and ended without a result."""


def measure_structured_streaming(
    keys: int, *, seconds: float = 8.0, batch_rows: Sequence[int] | None = None, cores: int = 2
) -> dict[str, Any]:
    """Sweep Structured Streaming over micro-batch sizes, ``seconds`` each after warm-up, in a fresh JVM.

    Returns:
        ``events_per_s_best`` (any latency), ``events_per_s_best_1s`` (batches of at most a second, None if no size
        was that fast), the sizes and times they were reached with, and ``sizes``: the figures of every size.

    Raises:
        PeerFailedError: it ended without a result.
    """
    arguments = ["--keys", str(keys), "--seconds", str(seconds), "--cores", str(cores)]
    if batch_rows is not None:
        arguments += ["--batch-rows", *map(str, batch_rows)]
    return run_peer(Path(sys.executable), "bench.peers.structured_streaming", arguments)


def measure_flink(
    keys: int,
    *,
    seconds: float = 15.0,
    warmup_seconds: float = 12.0,
    cores: int = 2,
    checkpoint_interval_ms: int = 1_000,
) -> dict[str, Any] | NotInstalled:
    """Measure Flink SQL for ``seconds`` after its warm-up in a fresh JVM.

    Returns:
        ``events_per_s``, ``checkpoints``, ``checkpoint_ms_median``, …, or ``NotInstalled``.

    Raises:
        PeerFailedError: it is installed and ended without a result.
    """
    python = environment_python()
    if not flink_is_installed(python):
        return NotInstalled("Flink SQL is not installed: run `make bench-peers`")
    arguments = ["--keys", str(keys), "--seconds", str(seconds), "--warmup-seconds", str(warmup_seconds)]
    arguments += ["--parallelism", str(cores), "--checkpoint-interval-ms", str(checkpoint_interval_ms)]
    return run_peer(python, "bench.peers.flink_sql", arguments)


def flink_is_installed(python: Path) -> bool:
    """Return whether ``python`` exists and finds PyFlink (without importing it, which takes seconds)."""
    return _finds(python, "pyflink")


def measure_keyed_update(
    keys: int,
    *,
    draws: Sequence[str],
    batch_rows: Sequence[int],
    seconds: float = 60.0,
    memory_mb: int = 2_000,
    cores: int = 2,
) -> dict[str, Any]:
    """Update ``keys`` keys in Structured Streaming, ``seconds`` for each size of micro-batches, in a fresh JVM.

    Returns:
        By the way keys are drawn, one of ``draws`` (``"zipf"``, ``"uniform"``): as ``measure_structured_streaming``,
        and ``fill_s``.

    Raises:
        PeerFailedError: it ended without a result.
    """
    arguments = ["--keys", str(keys), "--seconds", str(seconds), "--memory-mb", str(memory_mb), "--cores", str(cores)]
    arguments += ["--batch-rows", *map(str, batch_rows), "--draws", *draws]
    python = Path(sys.executable)
    return run_peer(python, "bench.peers.keyed_update", arguments, timeout_seconds=KEYED_UPDATE_TIMEOUT_SECONDS)


def measure_components_streaming(
    edges: int, vertices: int, batch_rows: Sequence[int], cores: int = 2
) -> dict[str, Any]:
    """Find the components of random edges with ``foreachBatch``, for each size of micro-batches, in a fresh JVM.

    Returns:
        ``edges_per_s_growing`` (smallest micro-batches), ``edges_per_s_at_once`` (largest), ``is_right``, ``sizes``.

    Raises:
        PeerFailedError: it ended without a result.
    """
    arguments = ["--edges", str(edges), "--vertices", str(vertices), "--cores", str(cores)]
    arguments += ["--batch-rows", *map(str, batch_rows)]
    return run_peer(Path(sys.executable), "bench.peers.components_streaming", arguments)


def measure_components_pathway(edges: int, vertices: int, cores: int = 2) -> dict[str, Any] | NotInstalled:
    """Find the components of random edges with Pathway's ``iterate``, all of them at once.

    Returns:
        ``edges_per_s_at_once``, ``is_right``, …, or ``NotInstalled``.

    Raises:
        PeerFailedError: it is installed and ended without a result.
    """
    python = environment_python(PATHWAY_ENVIRONMENT)
    if not _finds(python, "pathway"):
        return NotInstalled("Pathway is not installed: run `make bench-peers`")
    arguments = ["--edges", str(edges), "--vertices", str(vertices), "--cores", str(cores)]
    return run_peer(python, "bench.peers.components_pathway", arguments)


def measure_kafka(events: int) -> dict[str, Any] | NotInstalled:
    """Write and read so many events of 100 bytes with a broker of Kafka and its confluent client.

    Returns:
        ``written_per_s`` and ``read_per_s``, or ``NotInstalled``.

    Raises:
        PeerFailedError: it is installed and ended without a result.
    """
    python = environment_python(KAFKA_ENVIRONMENT)
    if not _finds(python, "confluent_kafka") or not any(broker_of(KAFKA_ENVIRONMENT).glob("kafka_*.jar")):
        return NotInstalled("Kafka is not installed: run `make bench-peers`")
    return run_peer(python, "bench.peers.kafka", ["--events", str(events)])


def measure_kafka_streaming(
    brokers: str, topic: str, target: str | None, records: int
) -> dict[str, Any] | NotInstalled:
    """Read a topic of so many records with Structured Streaming, or copy it to ``target``, at least once.

    Returns:
        ``records_per_s`` and ``records_per_cpu_s``, or ``NotInstalled``.

    Raises:
        PeerFailedError: it is installed and ended without a result.
    """
    if not streaming_connector():
        return NotInstalled("Spark's connector for Kafka is not installed: run `make bench-peers`")
    return run_peer(
        Path(sys.executable), "bench.peers.kafka_streaming", _kafka_arguments(brokers, topic, target, records)
    )


def measure_kafka_flink(brokers: str, topic: str, target: str | None, records: int) -> dict[str, Any] | NotInstalled:
    """Read a topic of so many records with Flink SQL, or copy it to ``target``, exactly once.

    Returns:
        ``records_per_s`` and ``records_per_cpu_s``, or ``NotInstalled``.

    Raises:
        PeerFailedError: it is installed and ended without a result.
    """
    python = environment_python()
    if not flink_is_installed(python) or not flink_connector():
        return NotInstalled("Flink SQL is not installed: run `make bench-peers`")
    return run_peer(python, "bench.peers.kafka_flink", _kafka_arguments(brokers, topic, target, records))


def measure_files_flink(files: Path, key: str, output: Path) -> dict[str, Any] | NotInstalled:
    """Have Flink SQL count, sum and find the maximum per ``key`` of the files, as ``bench/peers/real_input_flink.py``.

    Returns:
        ``s`` and ``cpu_s``, or ``NotInstalled``.

    Raises:
        PeerFailedError: it is installed and ended without a result.
    """
    python, jars = environment_python(), flink_parquet()
    if not flink_is_installed(python) or not jars:
        return NotInstalled("Flink SQL with Parquet is not installed: run `make bench-peers`")
    arguments = [str(files), str(output), "--key", key, "--jars", *map(str, jars)]
    return run_peer(python, "bench.peers.real_input_flink", arguments)


def run_peer(
    python: Path, module: str, arguments: Sequence[str], *, timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[str, Any]:
    """Run ``python -m module arguments`` from the project's root and return its last line as an object.

    Raises:
        PeerFailedError: exit status other than 0, no object on the last line, or no end within the time-out.
    """
    command = [str(python), "-m", module, *arguments]
    # Output goes to files: a JVM that outlives its parent would hold a pipe open for ever.
    with (
        tempfile.TemporaryDirectory(prefix="headgate-peer-", ignore_cleanup_errors=True) as scratch,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=errors, env=_scratch_env(scratch), start_new_session=True
        )
        try:
            status: int | None = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(process)
        printed, complained = _text_of(output), _text_of(errors)
    if status is None:
        raise PeerFailedError(f"{module} did not end within {timeout_seconds:.0f} s{_tail(complained)}")
    if status != 0:
        raise PeerFailedError(f"{module} ended with status {status}{_tail(complained or printed)}")
    return last_object(printed, module)


def last_object(printed: str, module: str) -> dict[str, Any]:
    """Return the JSON object on the last line of ``printed``.

    Raises:
        PeerFailedError: there is none.
    """
    lines = [line for line in printed.splitlines() if line.strip()]
    try:
        result = json.loads(lines[-1])
    except (IndexError, ValueError):
        result = None
    if not isinstance(result, dict):
        raise PeerFailedError(f"{module} printed no JSON object on its last line{_tail(printed)}")
    return result


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End ``process``, which leads a group of its own, together with everything it started; wait for itself."""
    # The JVMs are not our children, so nobody but the group's number leads to them.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _kafka_arguments(brokers: str, topic: str, target: str | None, records: int) -> list[str]:
    copied = [] if target is None else ["--target", target]
    return ["--brokers", brokers, "--topic", topic, "--records", str(records), *copied]


def _finds(python: Path, package: str) -> bool:
    if not python.exists():
        return False
    probe = f"import importlib.util as u, sys; sys.exit(not (u.find_spec('{package}') and u.find_spec('psutil')))"
    return subprocess.run([str(python), "-c", probe], capture_output=True).returncode == 0


def _scratch_env(scratch: str) -> dict[str, str]:
    """Return the environment that makes Python and JVM put all their files, checkpoints included, into ``scratch``.

    Nothing is prepared in the background, beside what is measured next.
    """
    options = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} -Djava.io.tmpdir={scratch}".strip()
    return os.environ | {"TMPDIR": scratch, "JAVA_TOOL_OPTIONS": options, "HEADGATE_PREPARE": "never"}


def _text_of(file: Any) -> str:
    file.seek(0)
    return bytes(file.read()).decode(errors="replace")


def _tail(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()][-OUTPUT_LINES_SHOWN:]
    return ":\n" + "\n".join(lines) if lines else ""
