"""Shortest paths from one vertex of a growing graph: every vertex learns its distance, and updates it when a new edge
makes a shorter path.

    headgate run examples/shortest_paths.py

``python examples/shortest_paths.py`` also checks the result. Each vertex keeps its shortest distance so far and its
outgoing edges. When the distance shrinks, or a new edge arrives, the vertex sends its neighbours their distance on this
path. These messages go through the loop again, until no vertex finds a shorter path. ``out/distances`` gets every
improvement.
"""

import heapq
import random
import sys
from collections.abc import Iterator
from typing import Any

import polars as pl
import pyarrow as pa

import headgate as hg

VERTICES, EDGES, SOURCE = 500, 2_000, 0
COLUMNS = {"vertex": pa.int64(), "distance": pa.float64(), "to": pa.int64(), "weight": pa.float64()}


class Distance(hg.ProcessFunction):
    """A row with a weight is an edge from ``vertex``, one without is a distance. In results ``to`` is whom to tell."""

    schema = COLUMNS

    def open(self, state: hg.StateHandle) -> None:
        """Declare what a vertex keeps."""
        self.distance = state.value("distance", pa.float64())
        self.edges = state.map("edges", pa.int64(), pa.float64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        """Take an edge, or a distance that is shorter; yield what it means for others."""
        shortest = self.distance.get()
        if row["weight"] is not None:
            if row["weight"] < self.edges.get(row["to"], float("inf")):
                self.edges.put(row["to"], row["weight"])
                if shortest is not None:
                    yield {**row, "distance": shortest + row["weight"]}
        elif shortest is None or row["distance"] < shortest:
            self.distance.put(row["distance"])
            yield row
            for to, weight in self.edges.items():
                yield {**row, "to": to, "distance": row["distance"] + weight}


def relax(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
    """The body of the loop: feed back what neighbours are told, put out improvements."""
    found = loop.process(Distance(), name="distance")
    told = found.filter(pl.col("to").is_not_null()).select(
        "distance", vertex="to", to=pl.lit(None, pl.Int64), weight=pl.lit(None, pl.Float64)
    )
    return told.select(*COLUMNS), found.filter(pl.col("to").is_null()).select("vertex", "distance")


def build(edges: hg.Stream, start: hg.Stream) -> hg.Stream:
    """Return every improvement (``vertex``, ``distance``).

    Args:
        edges: directed, with ``a``, ``b`` (int64) and a positive ``weight`` (float64).
        start: one row with the ``vertex`` (int64) from which distances are counted.
    """
    entering = edges.select(vertex="a", distance=pl.lit(None, pl.Float64), to="b", weight="weight")
    first = start.select(
        vertex="vertex", distance=pl.lit(0.0), to=pl.lit(None, pl.Int64), weight=pl.lit(None, pl.Float64)
    )
    return entering.union(first).key_by("vertex").iterate(relax, name="paths")


def random_edges(vertices: int = VERTICES, edges: int = EDGES, seed: int = 7) -> list[dict[str, Any]]:
    """Return weighted edges between random vertices."""
    dice = random.Random(seed)
    ends = ((dice.randrange(vertices), dice.randrange(vertices)) for _ in range(edges))
    return [{"a": a, "b": b, "weight": dice.randint(1, 100) / 8} for a, b in ends]


def distances(edges: list[dict[str, Any]], source: int) -> dict[int, float]:
    """Return the distance of every vertex that can be reached, by Dijkstra's algorithm."""
    outgoing: dict[int, list[tuple[int, float]]] = {}
    for edge in edges:
        outgoing.setdefault(edge["a"], []).append((edge["b"], edge["weight"]))
    found: dict[int, float] = {}
    queue = [(0.0, source)]
    while queue:
        distance, vertex = heapq.heappop(queue)
        if vertex not in found:
            found[vertex] = distance
            for to, weight in outgoing.get(vertex, ()):
                heapq.heappush(queue, (distance + weight, to))
    return found


def final(improvements: pl.DataFrame) -> dict[int, float]:
    """Return the distance of each vertex, from all its improvements."""
    return dict(improvements.group_by("vertex").agg(pl.col("distance").min()).iter_rows())


def pipeline() -> hg.Pipeline:
    """Return the pipeline; ``headgate run`` calls this."""
    p = hg.Pipeline("shortest-paths", parallelism=2, checkpointing=hg.Checkpointing(interval="1s"))
    edges = p.source(hg.FromRows(random_edges(), splits=4, batch_rows=50), name="edges")
    start = p.source(hg.FromRows([{"vertex": SOURCE}]), name="start")
    build(edges, start).sink(hg.FileSink("out/distances", "parquet"))
    return p


def main() -> int:
    """Run to the end and compare with Dijkstra."""
    pipeline().run()
    found, expected = final(pl.read_parquet("out/distances/*.parquet")), distances(random_edges(), SOURCE)
    is_right = found == expected  # weights are eighths, so sums are exact
    print(f"distances of {len(found)} vertices from {SOURCE}: {'right' if is_right else 'WRONG'}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
