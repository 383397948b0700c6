"""What tells nodes of a program apart is the same in every process (EV14)."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate.model.lineage import Lineage, Location, NodeKind

Row = dict[str, Any]

PROGRAM = """
import functools
import polars as pl
import headgate as hg

def merged(words, one, two):
    return {**one, "n": len({"x", "y", "zz", *words})}

class Counts(hg.ProcessFunction):
    schema = {"k": str}
    def __init__(self):
        self.words, self.later = {"a", "b", "c", "d"}, lambda row: row
        self.me = self
    def open(self, state):
        self.n = state.value("n", int)
    def process(self, row, context):
        return [{"k": row["k"]}]

p = hg.Pipeline("p")
s = p.source(hg.FromRows([{"k": "a", "n": 1}])).filter(pl.col("n").is_in([1, 2]))
s.key_by("k").reduce(functools.partial(merged, {"u", "v", "w"})).sink(hg.Discard())
s.key_by("k").process(Counts()).sink(hg.Discard())
print(sorted((name, one.digest) for name, one in p.definition().lineages.items()))
"""


def printed(seed: str) -> str:
    run = [sys.executable, "-c", PROGRAM]
    return subprocess.run(
        run, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
    ).stdout.decode()


def test_a_program_is_described_alike_in_every_process() -> None:
    assert printed("1") == printed("2") != ""


def total(one: Row, two: Row) -> Row:
    return one


def calling(by: int) -> Any:
    class Call:
        def __call__(self, one: Row, two: Row) -> Row:
            return {**one, "n": by}

    return Call()


def described(*functions: Any) -> list[Lineage]:
    pipeline = hg.Pipeline("p")
    stream = pipeline.source(hg.FromRows([{"k": "a", "n": 1}]), name="in")
    for function in functions:
        stream.key_by("k").reduce(function).sink(hg.Discard())
    found = pipeline.definition().lineages
    return [found[name] for name in sorted(found) if found[name].kind is NodeKind.OPERATOR]


def test_functions_are_told_apart_by_what_they_do_and_hold() -> None:
    def made(by: object) -> Any:
        return lambda one, two: {**one, "n": by}

    one, two, three = described(made(1), made(2), made(1))
    assert one.digest == three.digest != two.digest
    partial, plain = described(functools.partial(total), total)
    assert partial.digest != plain.digest
    one, two, three = described(calling(1), calling(2), calling(1))
    assert one.digest == three.digest != two.digest
    large = pa.array(range(10)).to_numpy()
    first, second = described(made(large), made(large + 1))
    assert first.digest != second.digest


def test_what_is_upstream_counts_up_to_what_has_a_name_of_its_own() -> None:
    def reduced(**names: Any) -> Lineage:
        pipeline = hg.Pipeline("p")
        least = names.pop("least")
        stream = pipeline.source(hg.FromRows([{"k": "a", "n": 1}]), name="in").filter(pl.col("n") > least, **names)
        stream.key_by("k").reduce(total).sink(hg.Discard())
        return pipeline.definition().lineages["reduce"]

    assert reduced(least=1).digest != reduced(least=2).digest
    long = [*range(1_000)]
    others = [pl.col("n").is_in(values) for values in (long, [*long[:500], -1, *long[501:]])]
    assert len({reduced(least=other.cast(pl.Int64)).digest for other in others}) == 2, "what is long counts whole"
    assert reduced(least=1, name="some") == reduced(least=2, name="some")


def test_only_what_may_be_mistaken_is_described(tmp_path: Path) -> None:
    pipeline = hg.Pipeline("p")
    stream = pipeline.source(hg.TextFiles(tmp_path, follow=True, pattern="*.log"), name="in")
    stream.with_columns(k=pl.lit("k")).key_by("k").reduce(total, name="all").sink(hg.StreamSink("out", str(tmp_path)))
    where = f"{tmp_path}/*.log"
    found = pipeline.definition().lineages
    assert found["in"] == Lineage(NodeKind.SOURCE, locations=(Location(where, where),))
    assert found["sink"].locations == (Location(f"{tmp_path}#out", f"{tmp_path}#out"),)
    assert found.keys() == {"in", "sink"}


def test_unnamed_dataframes_that_are_never_compared_need_names(monkeypatch: pytest.MonkeyPatch) -> None:  # EV14
    frame = SimpleNamespace(sparkSession=None, toArrow=None, isStreaming=False)
    monkeypatch.setattr(hg.DataFrameSource, "schema", lambda _: pa.schema({"k": pa.string()}))

    def made(changed: Any, *names: str | None) -> hg.Pipeline:
        pipeline = hg.Pipeline("p")
        for name in names:
            pipeline.source(hg.DataFrameSource(frame, changed=changed), name=name).sink(hg.Discard())
        return pipeline

    for fine in (made("keep", None), made("keep", None, "b"), made("refuse", None, None)):
        assert "source" in fine.definition().lineages
    with pytest.raises(hg.UsageError, match="'source', 'source-2' are DataFrames without names"):
        made("keep", None, None).definition()
