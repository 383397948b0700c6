"""A stateful processor written for Structured Streaming, as it is: how long each machine was above its limit.

    headgate run examples/stateful_processor.py
    headgate state show stateful-processor too-hot                # since when each machine is too hot

``TooHot`` knows nothing of Headgate: ``groupBy("machine").transformWithState(TooHot(), ...)`` runs the same class under
Spark. The readings are generated. Stop it with Ctrl-C and run it again: state and timers are part of every checkpoint.
"""

from collections.abc import Iterator

import polars as pl
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import headgate as hg

LIMIT, PATIENCE_MS = 85, 2_000
OUTPUT = "machine BIGINT, what STRING, at_ms BIGINT, highest BIGINT"


class TooHot(StatefulProcessor):
    """Tells when a machine has been too hot for a while, and when it has cooled down."""

    def init(self, handle) -> None:
        """Declare."""
        self.handle = handle
        self.hot = handle.getValueState("hot", "since_ms BIGINT, highest BIGINT")

    def handleInputRows(self, key, rows, timerValues) -> Iterator[Row]:  # noqa: N802, N803 - PySpark's names
        """Begin or end to be too hot."""
        for row in rows:
            found = self.hot.get()
            if row.celsius > LIMIT:
                since, highest = found or (row.ms, row.celsius)
                self.hot.update((since, max(highest, row.celsius)))
                if found is None:
                    self.handle.registerTimer(since + PATIENCE_MS)
            elif found is not None:
                self.handle.deleteTimer(found[0] + PATIENCE_MS)
                self.hot.clear()
                if row.ms > found[0] + PATIENCE_MS:
                    yield Row(machine=key[0], what="cooled down", at_ms=row.ms, highest=found[1])

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo) -> Iterator[Row]:  # noqa: N802, N803
        """It has been too hot for all this time."""
        at_ms = expiredTimerInfo.getExpiryTimeInMs()
        yield Row(machine=key[0], what="too hot", at_ms=at_ms, highest=self.hot.get()[1])


p = hg.Pipeline("stateful-processor", checkpointing=hg.Checkpointing(interval="1s"))
readings = p.source(
    hg.Generator(
        columns={"machine": hg.Uniform(0, 500), "celsius": hg.Uniform(10, 90)}, rows=100_000, rows_per_second=5_000
    )
)
timed = readings.with_timestamps("ts", out_of_orderness="200ms").with_columns(ms=pl.col("ts").dt.epoch("ms"))
told = timed.key_by("machine").transform_with_state(TooHot(), OUTPUT, time_mode="eventTime", name="too-hot")
told.sink(hg.FileSink("out/too-hot"))

if __name__ == "__main__":
    print(p.run())
