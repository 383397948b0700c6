"""Limits that change while readings flow: a small broadcast stream beside a large one.

    headgate run examples/changing_rules.py
    headgate state show changing-rules check limits     # what every subtask knew at the last checkpoint

Every second another limit arrives, and applies from then on in every subtask. Readings that exceed the limit of their
kind are in ``out/exceeded``. Stop it with Ctrl-C and run it again: limits are part of every checkpoint.
"""

from collections.abc import Iterator

import pyarrow as pa

import headgate as hg


class Check(hg.BroadcastProcessFunction):
    """Passes on what exceeds the limit of its kind, with the limit and a number that each sensor counts."""

    schema = {"sensor": pa.int64(), "value": pa.int64(), "limit": pa.int64(), "number": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        """Declare."""
        self.limits = state.broadcast("limits", str, pa.int64())
        self.count = state.value("count", pa.int64())

    def process_broadcast(self, row: dict, context: hg.BroadcastContext) -> None:
        """Note a limit, in every subtask."""
        self.limits.put(row["kind"], row["limit"])

    def process(self, row: dict, context: hg.ProcessContext) -> Iterator[dict]:
        """Compare a reading with the limit that there is now; without one it passes nothing on."""
        limit = self.limits.get(row["kind"])
        if limit is not None and row["value"] > limit:
            number = self.count.get(0) + 1
            self.count.put(number)
            yield {"sensor": row["sensor"], "value": row["value"], "limit": limit, "number": number}


p = hg.Pipeline("changing-rules", checkpointing=hg.Checkpointing(interval="1s"))
kinds = hg.Choice(("heat", "wind"))
limits = p.source(hg.Generator({"kind": kinds, "limit": hg.Uniform(30, 50)}, rows=30, rows_per_second=1), name="limits")
readings = p.source(
    hg.Generator(
        {"sensor": hg.Uniform(0, 100), "kind": kinds, "value": hg.Uniform(0, 51)}, rows=60_000, rows_per_second=2_000
    ),
    name="readings",
)
exceeded = readings.key_by("sensor").connect(limits.broadcast()).process(Check(), name="check")
exceeded.sink(hg.FileSink("out/exceeded"))

if __name__ == "__main__":
    print(p.run())
