"""Publish files of your own with the checkpoint that covers their records: none twice, none that a restart takes back.

    headgate run examples/publish_files.py -- /tmp/published

Each subtask writes JSON lines to a hidden file. A checkpoint finishes the file and makes it ready; when the checkpoint
has completed, the file gets its name. Ids of checkpoints are never used again, so the names are unique. The first
checkpoint after a restart removes hidden files of killed workers. (``FileSink`` does all this, and more.)
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TextIO

import pyarrow as pa

import headgate as hg


class JsonFiles(hg.PublishOnCheckpoint):
    """Writes each record to a file, and passes it on."""

    item_type = pa.struct({"hidden": pa.string(), "name": pa.string()})

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory).absolute()

    def restore(self, context: hg.RestoreContext) -> None:
        """Publish what the restored checkpoint held, and begin with no file."""
        self.index, self.parallelism = context.subtask_index, context.parallelism
        self.file: TextIO | None = None
        self.own: set[str] = set()
        self.is_swept = False
        super().restore(context)

    def __call__(self, row: dict) -> dict:
        """Write a record to the file of the next checkpoint."""
        if self.file is None:
            descriptor, self.hidden = tempfile.mkstemp(dir=self.directory, prefix=f".part-{self.index}-")
            self.file = os.fdopen(descriptor, "w")
            self.own.add(self.hidden)
        self.file.write(json.dumps(row, default=str) + "\n")
        return row

    def snapshot(self, context: hg.SnapshotContext) -> None:
        """Finish the file: its records are in this checkpoint."""
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.ready({"hidden": self.hidden, "name": f"{context.checkpoint_id:08d}-{self.index}.jsonl"})
            self.file = None
        super().snapshot(context)

    def publish(self, items: list) -> None:
        """Give the files their names; those that have them already keep them."""
        for item in items:
            if os.path.exists(item["hidden"]):
                os.replace(item["hidden"], self.directory / item["name"])
            self.own.discard(item["hidden"])
        descriptor = os.open(self.directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Publish; once behind each start remove what killed workers left: what was restored of it is public by now."""
        super().notify_checkpoint_complete(checkpoint_id)
        for path in [] if self.is_swept else self.directory.glob(".part-*-*"):
            is_mine = int(path.name.split("-")[1]) % self.parallelism == self.index  # there were more subtasks before
            if is_mine and str(path) not in self.own:
                path.unlink(missing_ok=True)
        self.is_swept = True


def pipeline() -> hg.Pipeline:
    """Return the pipeline; ``headgate run`` calls this."""
    directory = sys.argv[1] if len(sys.argv) > 1 else "published"
    Path(directory).mkdir(parents=True, exist_ok=True)
    p = hg.Pipeline("publish-files", checkpointing=hg.Checkpointing(interval="1s"))
    readings = p.source(
        hg.Generator(
            {"id": hg.RowNumber(), "value": hg.Uniform(0, 100)},
            rows=20_000,
            rows_per_second=5_000,
            time="deterministic",
        )
    )
    readings.map(JsonFiles(directory), name="files").sink(hg.Discard())
    return p


if __name__ == "__main__":
    print(pipeline().run())
