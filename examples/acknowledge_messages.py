"""A source that acknowledges messages to their broker when a completed checkpoint covers them, and not before.

    mkdir -p /tmp/inbox && for i in 1 2 3; do echo "{\\"id\\": $i}" > /tmp/inbox/$i.json; done
    headgate run examples/acknowledge_messages.py -- /tmp/inbox /tmp/received

The broker is a directory: a message is a file, and acknowledging it removes the file. Like a real broker, it delivers
unacknowledged messages again, even to a source that already has them in its checkpoint. The position of the source says
which messages these are.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

import headgate as hg
from headgate.connectors.base import Source, SourceBatch, SourceContext, SourceReader, owner_of_split

SPLIT = "inbox"
SCHEMA = pa.schema({"number": pa.int64(), "message": pa.large_string()})


class Inbox(Source):
    """Reads all messages that are there; they are numbered in the order in which they came."""

    is_listening = True
    """A pipeline that was started again after its end acknowledges what it may not have acknowledged."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory).absolute()

    def schema(self) -> pa.Schema:
        """Return the columns of a message."""
        return SCHEMA

    def identity(self) -> str:
        """Positions are numbers of messages."""
        return f"inbox {self.directory}"

    def open(self, context: SourceContext) -> "InboxReader":
        """Return a reader; that of subtask 0 has all messages."""
        return InboxReader(self.directory, context)


class InboxReader(hg.PublishOnCheckpoint, SourceReader):
    """Delivers one message at a time, and acknowledges what completed checkpoints cover."""

    item_type = int

    def __init__(self, directory: Path, context: SourceContext) -> None:
        self.directory = directory
        self.is_owner = owner_of_split(0, context.parallelism) == context.subtask_index
        self.position = int((context.positions or {}).get(SPLIT, b"0"))
        """Number of the last message that was delivered."""

    def _waiting(self) -> list[int]:
        if not self.is_owner:
            return []
        numbers = (int(path.stem) for path in self.directory.glob("*.json"))
        return sorted(number for number in numbers if number > self.position)

    def splits(self) -> Sequence[str]:
        """Return the only split."""
        return [SPLIT] if self.is_owner else []

    def poll(self) -> SourceBatch | None:
        """Return the next message; it is ready to be acknowledged with the next checkpoint."""
        for number in self._waiting()[:1]:
            message = (self.directory / f"{number}.json").read_text().strip()
            self.position = number
            self.ready(number)
            return SourceBatch(SPLIT, pa.RecordBatch.from_pylist([{"number": number, "message": message}], SCHEMA))
        return None

    def is_finished(self) -> bool:
        """Whether all that is there was delivered."""
        return not self._waiting()

    def positions(self) -> dict[str, bytes]:
        """Return the number of the last message."""
        return {SPLIT: b"%d" % self.position} if self.is_owner else {}

    def wakeup_ms(self) -> int:
        """There is always something to do until the end."""
        return 0

    def publish(self, items: list) -> None:
        """Acknowledge messages; it does no harm to do it again."""
        for number in items:
            (self.directory / f"{number}.json").unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is open."""


def pipeline() -> hg.Pipeline:
    """Return the pipeline; ``headgate run`` calls this."""
    inbox, received = sys.argv[1:] if len(sys.argv) > 2 else ("inbox", "received")
    p = hg.Pipeline("acknowledge-messages", checkpointing=hg.Checkpointing(interval="1s"))
    p.source(Inbox(inbox), name="inbox").sink(hg.FileSink(received))
    return p


if __name__ == "__main__":
    print(pipeline().run())
