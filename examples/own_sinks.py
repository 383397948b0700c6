"""Two sinks of about forty lines each: one prepares its output in the target, one keeps it in checkpoints.

    headgate run examples/own_sinks.py -- /tmp/numbers

The targets are files, so that no server is needed: a directory that other programs read, and a JSON document. Each
record of ``number`` and ``text`` is there once, whichever process dies. The conformance kit tests both of them
(``tests/examples/test_own_sinks_of_examples.py``).
"""

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

import headgate as hg

Document = dict[str, Any]


def replace_file(path: Path, text: str) -> None:
    """Write a file at once, so that it is there with all of ``text`` or as before."""
    new = path.with_name(f".{path.name}.new")
    with open(new, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


class DocumentTarget:
    """Remembers in a JSON document who owns a sink, and refuses all others."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    @contextlib.contextmanager
    def document(self) -> Iterator[Document]:
        """Give the document to one process at a time; what was changed in it is written unless an error comes."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{self.path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            found = json.loads(text or '{"owners": {}, "names": [], "numbers": []}')
            yield found
            if (changed := json.dumps(found)) != text:
                replace_file(self.path, changed)

    @contextlib.contextmanager
    def owned(self, fence: hg.Fence) -> Iterator[Document]:
        """Give the document, unless a newer generation or another pipeline of the same name owns the sink."""
        with self.document() as document:
            fence.refuse_if_replaced_by(owner_in(document, fence.owner))
            yield document

    def claim(self, fence: hg.Fence) -> None:
        """Remember who owns the sink from now on."""
        with self.owned(fence) as document:
            document["owners"][fence.owner] = [fence.generation, fence.life]

    def claimed(self, owner: str) -> hg.Fence | None:
        """Return who owns the sink."""
        with self.document() as document:
            return owner_in(document, owner)

    def all_claimed(self) -> Iterable[hg.Fence]:
        """Return who owns all sinks that write there."""
        with self.document() as document:
            return [hg.Fence(owner, *rest) for owner, rest in document["owners"].items()]


def owner_in(document: Document, owner: str) -> hg.Fence | None:
    """Return who owns a sink."""
    found = document["owners"].get(owner)
    return hg.Fence(owner, *found) if found else None


class DirectorySink(DocumentTarget, hg.TwoPhaseSink[list[dict[str, Any]]]):
    """Prepared records wait in a file in ``waiting``, which is moved to ``ready``, where other programs read it."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}/owners.json")
        self.waiting, self.ready = Path(path) / "waiting", Path(path) / "ready"

    def begin(self, name: str, schema: pa.Schema) -> list[dict[str, Any]]:
        """Collect in memory: a sink for many records would write a temporary file."""
        return []

    def write(self, transaction: list[dict[str, Any]], batch: pa.RecordBatch) -> None:
        """Add records."""
        transaction.extend(batch.to_pylist())

    def prepare(self, transaction: list[dict[str, Any]], name: str, fence: hg.Fence) -> None:
        """Have them wait under their name; a repeated call replaces the file."""
        with self.owned(fence):
            self.waiting.mkdir(exist_ok=True)
            replace_file(self.waiting / name, "".join(f"{json.dumps(row)}\n" for row in transaction))

    def prepared(self, owner: str) -> Iterable[str]:
        """Return what waits, ours and that of others."""
        return [path.name for path in self.waiting.glob("*")]

    def commit(self, names: Sequence[str], fence: hg.Fence) -> None:
        """Move what waits. What is ready was moved before."""
        with self.owned(fence):
            self.ready.mkdir(exist_ok=True)
            for name in names:
                if (self.ready / name).exists():
                    continue
                if not (self.waiting / name).exists():
                    raise hg.UsageError(f"{name} is neither in {self.waiting} nor in {self.ready}")
                os.rename(self.waiting / name, self.ready / name)

    def abort(self, name: str, fence: hg.Fence) -> None:
        """Remove what no checkpoint has."""
        with self.owned(fence):
            (self.waiting / name).unlink(missing_ok=True)

    def remove_output(self, fence: hg.Fence) -> None:
        """Remove everything: the pipeline starts over."""
        with self.owned(fence):
            for path in self.ready.glob("*"):
                if path.name.startswith(f"{fence.owner}-"):
                    path.unlink()


class DocumentSink(DocumentTarget, hg.LedgerSink):
    """Records stay in the checkpoint until it is completed, and come with their name into the document."""

    def publish(self, outputs: Sequence[hg.LedgerOutput], fence: hg.Fence) -> None:
        """Write records and names, or nothing."""
        with self.owned(fence) as document:
            for output in outputs:
                if output.name not in document["names"]:
                    document["names"].append(output.name)
                    for batch in output:  # read from the checkpoint, one after the other
                        document["numbers"] += [{**row, "owner": fence.owner} for row in batch.to_pylist()]

    def forget(self, owner: str, before: int) -> None:
        """Keep the list of names small."""
        with self.document() as document:
            document["names"] = [
                name
                for name in document["names"]
                if not name.startswith(f"{owner}-") or hg.output_checkpoint(name) >= before
            ]

    def remove_output(self, fence: hg.Fence) -> None:
        """Remove everything: the pipeline starts over."""
        with self.owned(fence) as document:
            document["numbers"] = [row for row in document["numbers"] if row["owner"] != fence.owner]
            document["names"] = [name for name in document["names"] if not name.startswith(f"{fence.owner}-")]


def pipeline() -> hg.Pipeline:
    """Return a pipeline that gives each number to one sink or to the other; ``headgate run`` calls this."""
    path = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "numbers")
    p = hg.Pipeline("own-sinks", checkpointing=hg.Checkpointing(interval="1s"))
    rows = p.source(hg.Generator({"number": hg.RowNumber()}, rows=20_000, rows_per_second=5_000))
    numbers = rows.select("number", text=pl.col("number").cast(pl.String))
    numbers.filter(pl.col("number") % 2 == 0).sink(DirectorySink(f"{path}/even"), name="even")
    numbers.filter(pl.col("number") % 2 == 1).sink(DocumentSink(f"{path}/odd.json"), name="odd")
    return p


if __name__ == "__main__":
    print(pipeline().run())
