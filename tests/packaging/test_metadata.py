"""What the package says of itself, and what importing it brings along."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import headgate
from headgate.distribution import DISTRIBUTION
from headgate.errors import UsageError
from headgate.storage.urls import open_storage

ROOT = Path(__file__).parents[2]

HEAVY = (
    *("pyspark", "py4j", "pyarrow", "polars", "numpy", "pandas", "sqlalchemy", "obstore", "rocksdict", "cryptography"),
    *("msgspec", "xxhash", "psutil", "typer", "rich", "asyncio", "multiprocessing", "ssl", "sqlite3", "concurrent"),
)
"""Whatever of these a plain import brought would cost a tenth of a second, or start threads, in every process."""


def brought_by(statement: str) -> set[str]:
    """Return the modules that a new Python has after ``statement``, without those that it begins with."""
    listing = f"import sys; before = set(sys.modules); {statement}; print(*sorted(set(sys.modules) - before))"
    told = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    return set(told.stdout.split())


def test_a_plain_import_brings_nothing_heavy() -> None:
    brought = {name.partition(".")[0] for name in brought_by("import headgate")}
    assert brought.isdisjoint(HEAVY)
    assert {name for name in brought_by("import headgate") if name.startswith("headgate")} == {
        "headgate",
        "headgate.dataclass",
        "headgate.errors",
        "headgate.plain_text",
        "headgate.public_names",
        "headgate.tracebacks",
    }


def test_a_name_is_brought_when_it_is_used() -> None:
    assert "headgate.api.config" in brought_by("import headgate; headgate.Checkpointing")


def test_a_pipeline_without_streams_needs_no_database() -> None:
    assert "sqlalchemy" not in brought_by("import headgate.cli.app")


def test_a_pipeline_is_defined_without_pandas() -> None:
    """Arrow imports it as soon as values become an array, which defining a pipeline does without."""
    defined = "hg.Pipeline('p').source(hg.Generator()).sink(hg.Discard())"
    assert "pandas" not in brought_by(f"import headgate as hg; {defined}")


def test_a_run_imports_no_other_command() -> None:
    brought = brought_by("from headgate.cli.__main__ import app_for; app_for(['run', 'program.py'])")
    assert "headgate.cli.run" in brought
    assert brought.isdisjoint({"pandas", "pyspark", "headgate.cli.streams", "headgate.codec.kafka.messages"})


def test_the_version_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert importlib.metadata.version(DISTRIBUTION) == headgate.__version__
    assert re.search(rf"^## {re.escape(headgate.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_what_is_optional_is_an_extra_and_not_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: {named(text) for text in texts} for name, texts in project["optional-dependencies"].items()}
    required = {named(text) for text in project["dependencies"]}
    optional = set[str]().union(*(names for extra, names in extras.items() if extra not in ("docs", "dev")))
    assert optional.isdisjoint(required)
    assert {"rocksdict", "obstore", "hdfs-native", "psycopg", "deltalake", "pyiceberg", "grpcio", "crc32c"} <= optional


def named(requirement: str) -> str:
    """Return the name of a package without extras and versions."""
    found = re.match(r"[\w-]+", requirement)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("url", ["s3://bucket/x", "obstore+memory:///"])
def test_an_object_store_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "headgate.storage.object_store", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'headgate-streams\[s3\]'"):
        open_storage(url)


def test_hdfs_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdfs_native", None)
    monkeypatch.delitem(sys.modules, "headgate.storage.hdfs", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'headgate-streams\[hdfs\]'"):
        open_storage("hdfs://namenode:8020/x")


@pytest.mark.parametrize("library", ["obstore", "rocksdict", "hdfs_native"])
def test_local_storage_needs_no_extra(library: str) -> None:
    without = f"import sys; sys.modules['{library}'] = None; import headgate.storage.urls"
    assert library not in brought_by(f"{without}; del sys.modules['{library}']")
