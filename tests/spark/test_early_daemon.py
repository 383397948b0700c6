"""A process from which workers are forked that was begun beside the JVM, and the one of Spark's that finds it."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headgate.spark.early_daemon import ADDRESS, MODULE, OF_WORKERS, SOCKET_BYTES_MAX, EarlyDaemon

EARLY = """
import os, sys
from headgate.spark.early_daemon import take_over
is_taken = take_over(sys.argv[1], lambda: print("ready", flush=True))
print(is_taken, os.environ.get("SPARK_REUSE_WORKER"), sys.argv[1:], flush=True)
"""
OURS = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
OF_SPARK = "from headgate.spark.early_daemon import hand_over; print(hand_over(), flush=True)"


def begin(program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**OURS, **environment}, text=True)


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return os.path.relpath(tmp_path_factory.mktemp("early") / "socket")  # such a path may have 100 characters


@pytest.fixture
def early(address: str) -> Iterator[subprocess.Popen[str]]:
    with begin(EARLY, address) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def said(process: subprocess.Popen[str]) -> list[str]:
    """Return what a process says after its input has been closed."""
    return process.communicate()[0].splitlines()


def test_the_early_one_becomes_what_spark_begins(early: subprocess.Popen[str], address: str) -> None:
    told = said(begin(OF_SPARK, "pyspark.worker", **{ADDRESS: address, "SPARK_REUSE_WORKER": "1"}))
    assert told == ["True 1 ['pyspark.worker']", "True"], "the first of them says the other one, to the same output"
    assert said(early) == []
    assert not Path(address).parent.exists()


@pytest.mark.parametrize("name", ["OPENBLAS_NUM_THREADS", "PYTHONHASHSEED"])
def test_an_early_one_with_other_settings_of_libraries_is_left_alone(
    early: subprocess.Popen[str], address: str, name: str
) -> None:
    assert said(begin(OF_SPARK, **{ADDRESS: address, name: "77"})) == ["False"]
    told = said(begin(OF_SPARK, **{ADDRESS: address}))
    assert told == ["True None []", "True"], "the next one that fits has it"
    assert said(early) == []


def test_an_early_one_that_is_not_needed_ends_with_the_process_that_began_it(
    early: subprocess.Popen[str], address: str
) -> None:
    assert said(early) == [f"False None {[address]}"]
    assert said(begin(OF_SPARK, **{ADDRESS: address})) == ["False"]
    assert said(begin(OF_SPARK, **{ADDRESS: ""})) == ["False"]


def test_none_is_begun_where_the_path_of_its_socket_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ("d" * (SOCKET_BYTES_MAX - len(str(tmp_path))))
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    assert EarlyDaemon.begin(os.environ, "early-") is None
    assert list(place.iterdir()) == []


@pytest.mark.long
def test_workers_are_forked_by_the_early_one(address: str) -> None:
    daemon = EarlyDaemon(OURS, Path(address).absolute().parent)
    given: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-m", MODULE, "pyspark.worker"]
    seed = {name: OURS[name] for name in ["PYTHONHASHSEED"] if name in OURS}  # one that is set stays
    of_spark = {**OURS, **OF_WORKERS, **seed, ADDRESS: daemon.address}
    while not Path(address).exists():  # Spark takes longer than that to begin its own
        time.sleep(0.01)
    with subprocess.Popen(command, env=of_spark, **given) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        (port,) = struct.unpack(">i", process.stdout.read(4))
        with socket.create_connection(("127.0.0.1", port)) as connection:
            (worker,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
            forked_by = psutil.Process(worker).ppid()
            assert forked_by in {child.pid for child in psutil.Process().children()} - {process.pid}
        process.stdin.close()
        assert process.wait() == 0
    daemon.end()
    assert not psutil.pid_exists(forked_by)
