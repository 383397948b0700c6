"""Tables of Delta and Iceberg that are appended to, or merged into: each record once, whatever is killed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from lake_program import PATIENCE_S, killed_and_started_again, program, until
from lakes import Tables
from tests.conftest import IS_DEEP
from tests.servers.objects import ObjectServer
from tests.support.killing import held_pipeline

from headgate import testing
from headgate.testing import Target, check_sink
from headgate.testing.sinks.fake_pipeline import SCHEMA
from headgate.testing.sinks.scenarios import check_commit_in_flight, check_late_commits, check_stale_generation

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

DEEP = (pytest.mark.deep,)
WAYS = [("delta", False), ("delta", True), ("iceberg", False), ("iceberg", True)]
"""Which tables, and whether they are merged into. Each pair has the kit, or a store of objects, in ``make test``."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("tables", "is_merged"),
    [pytest.param(*way, marks=() if way in (WAYS[0], WAYS[3]) else DEEP) for way in WAYS],
    indirect=["tables"],
)
def test_the_sink_passes_the_kit(tables: Tables, is_merged: bool) -> None:
    numbers = itertools.count()

    def fresh() -> Target:
        name = f"t{next(numbers)}"
        options: dict[str, Any] = {"is_marked": True, "upsert": ("number", "mark")} if is_merged else {}
        sink = tables.sink(name, create=True, **options)
        sink.check(SCHEMA)
        lose = None if is_merged else (lambda: tables.lose_uncommitted(name))
        return Target(sink, lambda: tables.rows(name), lose_prepared=lose)

    rescales = ((2, 2), (5, 2)) if IS_DEEP else ((3, 2),)
    left_out = check_sink(fresh, rescales=rescales, overlaps=(2,), rows=(0, 7) if IS_DEEP else (7,))
    assert [one.partition(":")[0] for one in left_out] == [
        "the order of the output",
        "what is left behind",
        "forgetting",
        *(["lost prepared", "lost prepared in recovery"] if is_merged else []),
        "taken away",
        "remove output",
        "interruptions",
        "outages",
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("tables_in_objects", "is_merged"),
    [pytest.param(*way, marks=() if way in (WAYS[1], WAYS[2]) else DEEP) for way in WAYS],
    indirect=["tables_in_objects"],
)
def test_tables_in_an_object_store_fence_and_find_commits(tables_in_objects: Tables, is_merged: bool) -> None:
    numbers = itertools.count()

    def fresh() -> Target:
        name = f"t{next(numbers)}"
        sink = tables_in_objects.sink(name, create=True, upsert="number" if is_merged else ())
        sink.check(SCHEMA)
        return Target(sink, lambda: tables_in_objects.rows(name))

    check_stale_generation(fresh())
    check_late_commits(fresh())
    check_commit_in_flight(fresh(), is_late=True)


@pytest.mark.long
def test_a_killed_server_of_objects_loses_and_repeats_nothing(
    objects: ObjectServer, tables_in_objects: Tables, tmp_path: Path
) -> None:
    tables = tables_in_objects
    pipeline = program(tmp_path, 2_000, tables.kind, {**tables.options(), "create": True})
    with testing.running(held_pipeline(pipeline, tmp_path / "gate"), parallelism=2) as handle:
        until(lambda: bool(tables.rows()))
        objects.fail()
        objects.heal()
        (tmp_path / "gate").touch()
        result = handle.wait(PATIENCE_S)
    assert result is not None
    assert sorted(row["number"] for row in tables.rows()) == list(range(2_000))


KILLS = dict(zip(WAYS, ("in-publish", "after-publish", "after-publish", "in-publish"), strict=True))
"""Of each way, the kill in ``make test``: before the entry of the table's log, or after it. The kit has them, too."""


@pytest.mark.run
@pytest.mark.parametrize(
    ("tables", "is_merged", "point"),
    [
        pytest.param(*way, point, marks=() if point == quick else DEEP)
        for way, quick in KILLS.items()
        for point in ("after-manifest", "in-publish", "after-publish")
    ],
    indirect=["tables"],
)
def test_a_process_killed_around_its_commits_has_each_record_once(
    tables: Tables, is_merged: bool, point: str, tmp_path: Path
) -> None:
    how = {"upsert": "kind"} if is_merged else {"partition_by": "kind"}
    options = {**tables.options(), "create": True, **how}
    killed_and_started_again(tmp_path, 1_500, tables.kind, options, point)
    found = tables.frame()
    assert set(found["kind"].to_list()) == {"a", "b"}
    if is_merged:
        assert (len(found), found["records"].sum()) == (2, 1_500)
    else:
        assert sorted(found["number"].to_list()) == list(range(1_500))
