"""PageRank of a growing graph: ranks follow every new edge, without ever starting again.

    headgate run examples/pagerank.py

``python examples/pagerank.py`` also checks the result. Each vertex keeps its rank, what it has received and not yet
passed on (the residual), and its outgoing edges. A residual above ``EPSILON`` is pushed: it is added to the rank, and
the damped part of it goes in equal shares to the neighbours, through the loop. A new edge makes all shares smaller, so
the old neighbours are sent a negative correction and the new one its share. Everything is a sum, so no order matters,
but nothing may be lost or counted twice. ``out/ranks`` gets every change of a rank; their sum is the rank.
"""

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

import headgate as hg

VERTICES, EDGES = 200, 800
DAMPING, EPSILON = 0.85, 1e-3
ERROR_MAX = EPSILON / (1 - DAMPING)  # relative: each vertex may hold back EPSILON of the 15 % that are its own
COLUMNS = {"vertex": pa.int64(), "amount": pa.float64(), "to": pa.int64()}

Edges = list[dict[str, int]]


class Rank(hg.ProcessFunction):
    """A row with ``to`` is a new edge, one without an amount that came. In results ``to`` is whom to give it."""

    schema = COLUMNS

    def open(self, state: hg.StateHandle) -> None:
        """Declare what a vertex keeps."""
        self.rank = state.value("rank", pa.float64())
        self.residual = state.value("residual", pa.float64())
        self.neighbours = state.list("neighbours", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        """Take an edge or an amount; push the residual when it has become large."""
        residual = self.residual.get(1 - DAMPING)  # what every vertex has by itself
        if row["to"] is not None:
            yield from self._connect(row["to"])
        else:
            residual += row["amount"]
        if abs(residual) > EPSILON:
            self.rank.put(self.rank.get(0.0) + residual)
            yield {"vertex": context.key, "amount": residual, "to": None}
            neighbours = self.neighbours.get()
            yield from _given(neighbours, DAMPING * residual / max(len(neighbours), 1))
            residual = 0.0
        self.residual.put(residual)

    def _connect(self, to: int) -> Iterator[dict[str, Any]]:
        """Add an edge: what was shared by n is now shared by n + 1."""
        shared, neighbours = DAMPING * self.rank.get(0.0), self.neighbours.get()
        count = len(neighbours)
        if count:
            yield from _given(neighbours, shared / (count + 1) - shared / count)
        yield from _given([to], shared / (count + 1))
        self.neighbours.append(to)


def _given(vertices: list[int], amount: float) -> Iterator[dict[str, Any]]:
    return ({"vertex": vertex, "amount": amount, "to": vertex} for vertex in vertices)


def push(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
    """The body of the loop: feed back what neighbours are given, put out changes of ranks."""
    moved = loop.process(Rank(), name="rank")
    given = moved.filter(pl.col("to").is_not_null()).with_columns(to=pl.lit(None, pl.Int64))
    return given, moved.filter(pl.col("to").is_null()).select("vertex", "amount")


def build(edges: hg.Stream) -> hg.Stream:
    """Return every change of a rank (``vertex``, ``amount``), for edges from ``a`` to ``b`` (int64)."""
    entering = edges.select(vertex="a", amount=pl.lit(0.0), to="b")
    return entering.key_by("vertex").iterate(push, name="pagerank")


def random_edges(vertices: int = VERTICES, edges: int = EDGES, seed: int = 7) -> Edges:
    """Return edges between random vertices, more of them to the lower ones."""
    dice = random.Random(seed)
    return [{"a": dice.randrange(vertices), "b": int(vertices * dice.random() ** 2)} for _ in range(edges)]


def ranks(edges: Edges) -> dict[int, float]:
    """Return the rank of every vertex of the whole graph by power iteration: 15 % its own, 85 % of what it is given."""
    vertices = sorted({end for edge in edges for end in edge.values()})
    at = {vertex: index for index, vertex in enumerate(vertices)}
    a, b = (np.array([at[edge[end]] for edge in edges]) for end in "ab")
    degree = np.bincount(a, minlength=len(vertices))
    rank: np.ndarray = np.ones(len(vertices))
    for _ in range(200):
        rank = 1 - DAMPING + DAMPING * np.bincount(b, (rank / np.maximum(degree, 1))[a], len(vertices))
    return dict(zip(vertices, rank.tolist(), strict=True))


def largest_error(changes: pl.DataFrame, edges: Edges) -> float:
    """Return how far the sums of changes are from the ranks, relative; infinite if other vertices have one."""
    found, expected = dict(changes.group_by("vertex").agg(pl.col("amount").sum()).iter_rows()), ranks(edges)
    if found.keys() != expected.keys():
        return float("inf")
    return max(abs(found[vertex] / rank - 1) for vertex, rank in expected.items())


def pipeline() -> hg.Pipeline:
    """Return the pipeline; ``headgate run`` calls this."""
    p = hg.Pipeline("pagerank", parallelism=2, checkpointing=hg.Checkpointing(interval="1s"))
    edges = p.source(hg.FromRows(random_edges(), splits=4, batch_rows=20))
    build(edges).sink(hg.FileSink("out/ranks", "parquet"))
    return p


def main() -> int:
    """Run to the end and compare with power iteration."""
    pipeline().run()
    error = largest_error(pl.read_parquet("out/ranks/*.parquet"), random_edges())
    is_right = error <= ERROR_MAX
    print(f"largest error of a rank: {error:.2%}, at most {ERROR_MAX:.2%}: {'right' if is_right else 'WRONG'}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
