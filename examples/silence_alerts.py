"""Alerts for silent machines: each machine has a timer for every reading, and one for when it counts as silent.

    headgate run examples/silence_alerts.py
    headgate state show silence-alerts silence                              # the last reading of each machine
    headgate state show silence-alerts silence headgate.timers.event_time   # readings to come, and when each is silent

The readings are generated. Stop it with Ctrl-C and run it again: timers are part of every checkpoint, and each silence
is reported exactly once, in ``out/silence``. Which silences there are does not depend on how fast readings come:
timers fire in the order of event time, so ``on_timer`` sees all readings up to its time, and none behind it.
"""

from collections.abc import Iterator
from datetime import timedelta

import pyarrow as pa

import headgate as hg

SILENCE = timedelta(seconds=1)


class Silence(hg.ProcessFunction):
    """Reports when a machine has sent nothing for ``SILENCE`` of event time."""

    schema = {"machine": pa.int64(), "last_reading": pa.timestamp("us"), "silent_since": pa.timestamp("us")}

    def open(self, state: hg.StateHandle) -> None:
        """Declare."""
        self.waiting = state.map("waiting", pa.timestamp("us"), pa.bool_())
        self.last = state.value("last", pa.timestamp("us"))

    def process(self, row: dict, context: hg.ProcessContext) -> None:
        """Have the reading wait until event time has reached it."""
        at = row["ts"].replace(microsecond=row["ts"].microsecond // 1_000 * 1_000)  # timers have milliseconds
        self.waiting.put(at, True)
        context.timers.register_event_time(at)

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[dict]:
        """Report a silence; take over a reading."""
        last = self.last.get()
        if last is not None and timer.time == last + SILENCE:
            yield {"machine": context.key, "last_reading": last, "silent_since": timer.time}
        if self.waiting.contains(timer.time):
            self.waiting.remove(timer.time)
            if last is None or timer.time > last:
                self.last.put(timer.time)
                context.timers.register_event_time(timer.time + SILENCE)


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
