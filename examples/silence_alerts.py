"""Alerts for silent machines: each machine has a timer, which every reading moves forward.

    headgate run examples/silence_alerts.py
    headgate state show silence-alerts silence                              # the last reading of each machine
    headgate state show silence-alerts silence headgate.timers.event_time   # when each would count as silent

The readings are generated. Stop it with Ctrl-C and run it again: timers are part of every checkpoint, and each silence
is reported exactly once, in ``out/silence``.
"""

from collections.abc import Iterator
from datetime import timedelta

import pyarrow as pa

import headgate as hg

SILENCE = timedelta(seconds=1)


class Silence(hg.ProcessFunction):
    """Tells when a machine has sent nothing for ``SILENCE`` of event time."""

    schema = {"machine": pa.int64(), "last_reading": pa.timestamp("us"), "silent_since": pa.timestamp("us")}

    def open(self, state: hg.StateHandle) -> None:
        """Declare."""
        self.last = state.value("last", pa.timestamp("us"))

    def process(self, row: dict, context: hg.ProcessContext) -> None:
        """Move the machine's timer on."""
        before = self.last.get()
        if before is not None and row["ts"] <= before:
            return
        if before is not None:
            context.timers.delete_event_time(before + SILENCE)
        self.last.put(row["ts"])
        context.timers.register_event_time(row["ts"] + SILENCE)

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[dict]:
        """Tell, and forget the machine until it sends again."""
        if not context.timers.is_end:  # then nobody will send anything any more
            yield {"machine": context.key, "last_reading": self.last.get(), "silent_since": timer.time}
        self.last.clear()


p = hg.Pipeline("silence-alerts", checkpointing=hg.Checkpointing(interval="1s"))
readings = p.source(
    hg.Generator(
        columns={"machine": hg.Uniform(0, 3_000), "celsius": hg.Uniform(10, 90)}, rows=100_000, rows_per_second=5_000
    )
)
alerts = readings.with_timestamps("ts", out_of_orderness="200ms").key_by("machine").process(Silence(), name="silence")
alerts.sink(hg.FileSink("out/silence"))

if __name__ == "__main__":
    print(p.run())
