"""Real drivers with workers in child processes; a throw-away certificate."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.launching import FINGERPRINT, ProcessLauncher, Zygote
from tests.runtime.running import SILENCE_MS_MAX, Run

from headgate.model.plan import PipelineDefinition
from headgate.model.progress import SilentObserver
from headgate.runtime.driver.driver import Driver
from headgate.spark.session import SparkHandle


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def start(zygote: Zygote) -> Iterator[Callable[..., Run]]:
    """Start a pipeline; after the test it has ended and left nothing behind."""
    runs: list[Run] = []

    def begin(definition: PipelineDefinition, **options: Any) -> Run:
        run = Run(zygote, definition, **options)
        runs.append(run)
        return run

    yield begin
    for run in runs:
        run.close()


@pytest.fixture
def started(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PipelineDefinition]]:
    """Run pipelines of the public API with workers in child processes; return what was started."""
    definitions: list[PipelineDefinition] = []
    launchers: list[ProcessLauncher] = []

    def start(definition: PipelineDefinition, *, observer: Any = None, **_: Any) -> SparkHandle:
        runtime = replace(definition.config.runtime, heartbeat_timeout_ms=SILENCE_MS_MAX)
        definition = replace(definition, config=replace(definition.config, runtime=runtime))
        definitions.append(definition)
        launchers.append(ProcessLauncher(zygote, definition))
        driver = Driver(definition, launchers[-1], observer or SilentObserver(), FINGERPRINT)
        driver.supervision.machine.job.END_TIMEOUT_MS = SILENCE_MS_MAX
        driver.start()
        return SparkHandle(driver)

    monkeypatch.setattr("headgate.spark.session.start_pipeline", start)
    monkeypatch.setattr("headgate.spark.session.check_cluster", lambda *_: None)
    yield definitions
    assert not any(launcher.alive() for launcher in launchers)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a self-signed certificate for 127.0.0.1, made for this session."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command is needed to make a throw-away certificate, and is not installed")
    directory = tmp_path_factory.mktemp("certificate")
    key, found = directory / "key.pem", directory / "both.pem"
    command = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", key, "-out", found],
        check=True,
        capture_output=True,
    )
    found.write_bytes(key.read_bytes() + found.read_bytes())
    return found
