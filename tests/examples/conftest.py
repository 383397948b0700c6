"""Examples run with the real driver and real workers, as child processes instead of on Spark."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest
from pyspark import cloudpickle

import headgate as hg
from headgate.connectors.files.file_committer import read_committed

sys.path.append(str(Path(__file__).resolve().parents[1] / "runtime"))  # the launcher of the runtime's tests

from launching import Zygote

from running import Run, definition_of, pipeline_at

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def example() -> Iterator[Callable[[str], ModuleType]]:
    """Load an example by its name; its functions travel to the workers."""
    loaded: dict[str, ModuleType] = {}

    def load(name: str) -> ModuleType:
        if name in loaded:
            return loaded[name]
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        cloudpickle.register_pickle_by_value(module)
        loaded[name] = module
        return module

    yield load
    for module in loaded.values():
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[module.__name__]


@pytest.fixture
def start(zygote: Zygote) -> Iterator[Callable[[hg.Pipeline], Run]]:
    """Start a pipeline; after the test it has ended and left nothing behind."""
    runs: list[Run] = []

    def begin(pipeline: hg.Pipeline) -> Run:
        runs.append(Run(zygote, definition_of(pipeline)))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture
def results(zygote: Zygote, tmp_path: Path) -> Callable[..., list[pl.DataFrame]]:
    """Run what ``build(pipeline)`` makes, on two workers, to the end; return the records of its streams."""

    def run(build: Callable[[hg.Pipeline], tuple[hg.Stream, ...]]) -> list[pl.DataFrame]:
        pipeline = pipeline_at(tmp_path, parallelism=2)
        streams = build(pipeline)
        for number, stream in enumerate(streams):
            stream.sink(hg.FileSink(tmp_path / str(number), "parquet"), name=f"out-{number}")
        started = Run(zygote, definition_of(pipeline))
        try:
            assert started.result().is_finished
            assert started.restarts == []
        finally:
            started.close()
        return [read_committed(str(tmp_path / str(number))) for number in range(len(streams))]

    return run
