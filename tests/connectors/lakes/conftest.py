"""Tables of Delta and Iceberg, on this machine and in a server of objects."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from lakes import DeltaTables, IcebergTables, Tables
from tests.servers.objects import BUCKET, KEY, SECRET, ObjectServer, object_server

_numbers = itertools.count()


@pytest.fixture(params=["delta", "iceberg"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    """On this machine."""
    return DeltaTables(tmp_path) if request.param == "delta" else IcebergTables.below(tmp_path)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("objects")) as server:
        yield server


@pytest.fixture(params=["delta", "iceberg"])
def tables_in_objects(
    request: pytest.FixtureRequest, objects: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Tables:
    """In a server of objects; the secrets are in the environment."""
    place = f"s3://{BUCKET}/tables-{next(_numbers)}"
    if request.param == "delta":
        return DeltaTables(place)
    monkeypatch.setenv("PYICEBERG_CATALOG__OBJECTS__S3__ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("PYICEBERG_CATALOG__OBJECTS__S3__SECRET_ACCESS_KEY", SECRET)
    properties = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": place,
        "s3.endpoint": objects.endpoint,
        "s3.region": "us-east-1",
    }
    return IcebergTables(properties, "objects")
