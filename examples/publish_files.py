"""Publish files of your own with the checkpoint that covers their records: none twice, none that a restart takes back.

    headgate run examples/publish_files.py -- /tmp/published

Each subtask writes JSON lines to a hidden file. A checkpoint finishes the file, and makes it ready; when the checkpoint
is completed, the file gets its name. Ids of checkpoints never come again, so neither do the names. What a killed worker
had not finished stays behind as a hidden file that nobody needs. (``FileSink`` does all this, and more.)
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import pyarrow as pa

import headgate as hg


class JsonFiles(hg.PublishOnCheckpoint):
    """Writes each record to a file, and passes it on."""

    item_type = pa.struct({"hidden": pa.string(), "name": pa.string()})

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory).absolute()

    def restore(self, context: hg.RestoreContext) -> None:
        """Publish what the restored checkpoint held, and begin with no file."""
        super().restore(context)
        self.index, self.file = context.subtask_index, None

    def __call__(self, row: dict) -> dict:
        """Write a record to the file of the next checkpoint."""
        if self.file is None:
            descriptor, self.hidden = tempfile.mkstemp(dir=self.directory, prefix=".")
            self.file = os.fdopen(descriptor, "w")
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
        descriptor = os.open(self.directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def pipeline() -> hg.Pipeline:
    """Return the pipeline; ``headgate run`` calls this."""
    directory = sys.argv[1] if len(sys.argv) > 1 else "published"
    Path(directory).mkdir(parents=True, exist_ok=True)
    p = hg.Pipeline("publish-files", checkpointing=hg.Checkpointing(interval="1s"))
    columns = {"id": hg.RowNumber(), "value": hg.Uniform(0, 100)}
    readings = p.source(hg.Generator(columns, rows=20_000, rows_per_second=5_000, time="deterministic"))
    readings.map(JsonFiles(directory), name="files").sink(hg.Discard())
    return p


if __name__ == "__main__":
    print(pipeline().run())
