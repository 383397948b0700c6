"""Every shape in which a DataFrame of a source can be filtered and used again, compared with what Python filters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"

Filter = tuple[str, Callable[[Any], bool]]
"""A condition in SQL, and the same in Python."""


@contextmanager
def pushing_filters(spark: Any) -> Iterator[None]:
    """Within this block the session offers filters to Python sources: a setting of its user's."""
    spark.conf.set(PUSHDOWN, "true")
    try:
        yield
    finally:
        spark.conf.unset(PUSHDOWN)


def check_every_use(load: Callable[[], Any], spark: Any, first: Filter, second: Filter) -> None:
    """Use what ``load`` returns with two filters; what comes out is what they leave of all rows.

    The order matters: Spark keeps what it has planned of a source, and a filter could stay with it.
    """
    (one, is_one), (two, is_two) = first, second
    every = load().collect()
    ones, twos = [row for row in every if is_one(row)], [row for row in every if is_two(row)]
    assert 0 < len(ones) < len(every)
    assert 0 < len(twos) < len(every)

    frame = load()
    check(frame.where(one), ones)
    check(frame, every)
    check(frame.where(two), twos)
    left, right = frame.where(one).alias("left"), frame.alias("right")
    is_same = [left[name].eqNullSafe(right[name]) for name in frame.columns]
    assert left.join(right, on=is_same).count() == len(ones), "joined with itself; no row is there twice"
    check(frame.exceptAll(frame.where(one)), [row for row in every if not is_one(row)])

    frame = load()
    check(frame.where(one).union(frame.where(two)).union(frame), ones + twos + every)

    frame = load()
    cached = frame.where(one).cache()
    check(cached, ones)
    check(frame.where(two), twos)
    check(frame, every)
    cached.unpersist()

    load().createOrReplaceTempView("filtered_reads")
    check(spark.sql(f"SELECT * FROM filtered_reads WHERE {one}"), ones)
    check(spark.table("filtered_reads"), every)
    counts = f"SELECT (SELECT count(*) FROM filtered_reads WHERE {two}), (SELECT count(*) FROM filtered_reads)"
    assert [tuple(row) for row in spark.sql(counts).collect()] == [(len(twos), len(every))]
    spark.catalog.dropTempView("filtered_reads")


def check(frame: Any, expected: list[Any]) -> None:
    assert Counter(map(tuple, frame.collect())) == Counter(map(tuple, expected))
