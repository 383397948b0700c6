"""Which vertices can be reached from which sources, while links and sources come and go.

    headgate run examples/reachability.py

``python examples/reachability.py`` also checks the result. Each vertex keeps its outgoing links and every path that
reaches it. A new path joins the links, a new link the paths; a longer path is sent to its end, through the loop, unless
it has been there already. Every link has a version. When a link is deleted, its version is announced along the links. A
vertex that receives the announcement drops all paths with that version, and remembers it, because such a path may still
be under way. A mark that makes a vertex a source is also a link: the first link of all paths that begin there.
``out/reachability`` gets +1 when a source begins to reach a vertex, and -1 when it no longer does.
"""

import random
import sys
from collections.abc import Iterator
from typing import Any

import polars as pl
import pyarrow as pa

import headgate as hg

VERTICES, CHANGES = 300, 800
# what: link, unlink, path, deleted; or reached, lost. path: its vertices; versions: of its links, the mark's first.
COLUMNS = {
    "vertex": pa.int64(),
    "what": pa.string(),
    "to": pa.int64(),
    "version": pa.int64(),
    "path": pa.list_(pa.int64()),
    "versions": pa.list_(pa.int64()),
}

Row = dict[str, Any]


class Paths(hg.ProcessFunction):
    """Rows say what happened at a vertex: an input, a path that came, or a version that was deleted."""

    schema = COLUMNS

    def open(self, state: hg.StateHandle) -> None:
        """Declare what a vertex keeps."""
        self.links = state.map("links", pa.int64(), pa.int64())  # version to end
        self.paths = state.map("paths", pa.string(), pa.list_(pa.int64()))  # versions as text to vertices
        self.deleted = state.map("deleted", pa.int64(), pa.bool_())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Take one input; yield what others must hear and what changed for the sources."""
        vertex: int = context.key
        match row["what"]:
            case "link" if row["to"] == vertex:
                yield from self._reached([vertex], [row["version"]])
            case "link" if not self.deleted.contains(row["version"]):
                self.links.put(row["version"], row["to"])
                for versions, path in self.paths.items():
                    yield from _longer(path, _numbers(versions), row["to"], row["version"])
            case "path":
                yield from self._reached(row["path"], row["versions"])
            case "unlink" | "deleted" if not self.deleted.contains(row["version"]):
                yield from self._without(vertex, row["version"])

    def _reached(self, path: list[int], versions: list[int]) -> Iterator[Row]:
        if any(self.deleted.contains(version) for version in versions):
            return
        if not self._is_reached_from(path[0]):
            yield _row(path[-1], "reached", path=path)
        self.paths.put(",".join(map(str, versions)), path)
        for version, to in self.links.items():
            yield from _longer(path, versions, to, version)

    def _without(self, vertex: int, deleted: int) -> Iterator[Row]:
        self.deleted.put(deleted, True)
        own_end = self.links.get(deleted)
        ends = [to for _, to in self.links.items()] if own_end is None else [own_end]
        yield from (_row(to, "deleted", version=deleted) for to in sorted(set(ends)))
        self.links.remove(deleted)
        dropped = [(text, path) for text, path in self.paths.items() if deleted in _numbers(text)]
        for text, _ in dropped:
            self.paths.remove(text)
        for source in sorted({path[0] for _, path in dropped}):
            if not self._is_reached_from(source):
                yield _row(vertex, "lost", path=[source])

    def _is_reached_from(self, source: int) -> bool:
        return any(path[0] == source for _, path in self.paths.items())


def _longer(path: list[int], versions: list[int], to: int, version: int) -> Iterator[Row]:
    if to not in path:
        yield _row(to, "path", path=[*path, to], versions=[*versions, version])


def _row(vertex: int, what: str, **columns: Any) -> Row:
    return {**dict.fromkeys(COLUMNS), "vertex": vertex, "what": what, **columns}


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def explore(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
    """The body of the loop: feed back paths and deleted versions, put out what sources reach."""
    found, is_news = loop.process(Paths(), name="paths"), pl.col("what").is_in(["path", "deleted"])
    change = pl.when(pl.col("what") == "reached").then(1).otherwise(-1).cast(pl.Int64)
    changes = found.filter(~is_news).select("vertex", source=pl.col("path").list.first(), change=change)
    return found.filter(is_news), changes


def build(changes: hg.Stream) -> hg.Stream:
    """Return when a ``source`` begins to reach a ``vertex`` (``change`` 1), and when it no longer does (-1).

    Args:
        changes: ``vertex``, ``to``, ``version`` (int64) and ``what``: "link" or "unlink". A link from a vertex to
            itself makes it a source. Each link has a version of its own, which its deletion repeats.
    """
    nothing = pl.lit(None, pl.List(pl.Int64))
    entering = changes.select("vertex", "what", "to", "version", path=nothing, versions=nothing)
    return entering.key_by("vertex").iterate(explore, name="reachability")


def random_changes(vertices: int = VERTICES, changes: int = CHANGES, seed: int = 7) -> list[Row]:
    """Return 15 % new sources, 5 % deleted ones, 60 % new links, 20 % deleted ones; many links continue others."""
    dice, made = random.Random(seed), []
    alive: dict[bool, list[Row]] = {True: [], False: []}
    for version in range(changes):
        is_mark, is_new = dice.choices([(True, True), (True, False), (False, True), (False, False)], [15, 5, 60, 20])[0]
        if not is_new and alive[is_mark]:
            gone = alive[is_mark].pop(dice.randrange(len(alive[is_mark])))
            made.append({**gone, "what": "unlink"})
            continue
        known = alive[dice.random() < 1 / 3]  # begin at a source, or at the end of a link
        begin = dice.choice(known)["to"] if known and dice.random() < 0.3 else dice.randrange(vertices)
        end = begin if is_mark else (begin + dice.randrange(1, vertices)) % vertices
        alive[is_mark].append({"vertex": begin, "what": "link", "to": end, "version": version})
        made.append(alive[is_mark][-1])
    return made


def reachable(changes: list[Row]) -> set[tuple[int, int]]:
    """Return all pairs of a source and a vertex that it reaches at the end, by breadth-first search."""
    gone = {row["version"] for row in changes if row["what"] == "unlink"}
    alive = [(row["vertex"], row["to"]) for row in changes if row["version"] not in gone]
    found: set[tuple[int, int]] = set()
    for source in {a for a, b in alive if a == b}:
        queue = [source]
        while queue:
            vertex = queue.pop()
            if (source, vertex) not in found:
                found.add((source, vertex))
                queue += [b for a, b in alive if a == vertex]
    return found


def final(changes: pl.DataFrame) -> set[tuple[int, int]]:
    """Return the pairs that remain when all changes are added up; each pair was counted 0 or 1 times at any moment."""
    sums = changes.group_by("source", "vertex").agg(pl.col("change").sum())
    assert set(sums["change"]) <= {0, 1}, "a change was lost or counted twice"
    return set(sums.filter(pl.col("change") == 1).select("source", "vertex").iter_rows())


def pipeline() -> hg.Pipeline:
    """Return the pipeline; ``headgate run`` calls this."""
    p = hg.Pipeline("reachability", parallelism=2, checkpointing=hg.Checkpointing(interval="1s"))
    changes = p.source(hg.FromRows(random_changes(), splits=2, batch_rows=20))
    build(changes).sink(hg.FileSink("out/reachability", "parquet"))
    return p


def main() -> int:
    """Run to the end and compare with a search of the graph that is left."""
    pipeline().run()
    found, expected = final(pl.read_parquet("out/reachability/*.parquet")), reachable(random_changes())
    print(f"{len(found)} vertices reached from sources: {'right' if found == expected else 'WRONG'}")
    return 0 if found == expected else 1


if __name__ == "__main__":
    sys.exit(main())
