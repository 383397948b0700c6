"""Connected components of a growing graph: every vertex learns the smallest vertex that it is connected with.

    headgate run examples/connected_components.py

``python examples/connected_components.py`` also checks the result. Each vertex keeps its neighbours and the smallest
label that it has received. When an edge arrives, or a label becomes smaller, the vertex sends its label to its
neighbours. These messages are fed back and go through the loop again, until no vertex learns a smaller label.
``out/components`` gets every change of a label; the smallest label of a vertex is its component.
"""

import sys

import numpy as np
import polars as pl
import pyarrow as pa

import headgate as hg

VERTICES, EDGES = 20_000, 15_000


class Labels(hg.BatchProcessFunction):
    """A row with ``to`` is a new edge, one without is news of a label. Results are news for others, and changes."""

    schema = {"vertex": pa.int64(), "label": pa.int64(), "is_news": pa.bool_()}

    def open(self, state: hg.BatchStateHandle) -> None:
        """Declare what a vertex keeps."""
        self.label = state.value("label", pa.int64())
        self.neighbours = state.list("neighbours", pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        """Take the labels that are smaller; tell old neighbours of the changes, and new ones of the label."""
        changed = self.label.update(batch["label"], "min")
        rows, old = self.neighbours.explode(where=changed)
        is_edge = batch["to"].is_not_null()
        self.neighbours.append(batch["to"], where=is_edge)
        told = pl.DataFrame({"vertex": old, "label": batch["label"][rows]})
        new = pl.DataFrame({"vertex": batch["to"], "label": self.label.get()}).filter(is_edge)
        # Of what a batch tells a vertex only the smallest can matter.
        news = pl.concat([told, new]).group_by("vertex").agg(pl.col("label").min())
        changes = batch.filter(changed).select("vertex", "label", is_news=pl.lit(False))
        return pl.concat([changes, news.with_columns(is_news=pl.lit(True))])


def spread(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
    """The body of the loop: feed back what vertices tell each other, put out changes."""
    found = loop.process(Labels(), name="labels")
    news = found.filter(pl.col("is_news")).select("vertex", "label", to=pl.lit(None, pl.Int64))
    return news, found.filter(~pl.col("is_news")).select("vertex", "label")


def both_ways(edges: pl.DataFrame) -> pl.DataFrame:
    """Give each edge to both of its ends; an end's first label is its own number."""
    there = edges.select(vertex="a", label="a", to="b")
    return pl.concat([there, edges.select(vertex="b", label="b", to="a")])


def build(edges: hg.Stream) -> hg.Stream:
    """Return all changes of labels (``vertex``, ``label``), for edges between ``a`` and ``b`` (int64)."""
    return edges.map_batches(both_ways, name="both-ways").key_by("vertex").iterate(spread, name="components")


def random_edges(vertices: int = VERTICES, edges: int = EDGES, seed: int = 7) -> pl.DataFrame:
    """Return edges between random vertices; there are many components as long as edges are few."""
    return pl.DataFrame(np.random.default_rng(seed).integers(0, vertices, (edges, 2)), schema=["a", "b"])


def component_of(edges: pl.DataFrame) -> dict[int, int]:
    """Return the smallest connected vertex of each vertex, by union-find: what the pipeline must find."""
    parent: dict[int, int] = {}

    def root(vertex: int) -> int:
        while (above := parent.setdefault(vertex, vertex)) != vertex:
            parent[vertex] = vertex = parent[above]
        return vertex

    for a, b in edges.iter_rows():
        low, high = sorted((root(a), root(b)))
        parent[high] = low
    return {vertex: root(vertex) for vertex in parent}


def final(changes: pl.DataFrame) -> dict[int, int]:
    """Return the component of each vertex, from all changes of its label."""
    return dict(changes.group_by("vertex").agg(pl.col("label").min()).iter_rows())


def pipeline() -> hg.Pipeline:
    """Return the pipeline; ``headgate run`` calls this."""
    p = hg.Pipeline("connected-components", parallelism=2, checkpointing=hg.Checkpointing(interval="1s"))
    edges = p.source(hg.FromRows(random_edges(), splits=4, batch_rows=500))
    build(edges).sink(hg.FileSink("out/components", "parquet"))
    return p


def main() -> int:
    """Run to the end and compare with union-find."""
    pipeline().run()
    found, expected = final(pl.read_parquet("out/components/*.parquet")), component_of(random_edges())
    is_right = found == expected
    print(f"{len(set(found.values()))} components of {len(found)} vertices: {'right' if is_right else 'WRONG'}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
