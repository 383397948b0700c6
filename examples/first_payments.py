"""Count repeated payments once: the state remembers each payment for ten seconds, and then forgets it.

    headgate run examples/first_payments.py
    headgate state show first-payments first --columns payment,_expires   # what is remembered, and until when

The payments are generated, and some of them are repeated. Stop it with Ctrl-C and run it again: every checkpoint
contains the payments that were seen, with their expiry. Expired payments take no space.
"""

import polars as pl
import pyarrow as pa

import headgate as hg


class First(hg.BatchProcessFunction):
    """Passes on payments that were not seen lately."""

    def open(self, state: hg.BatchStateHandle) -> None:
        """Declare."""
        self.seen = state.value("seen", pa.bool_(), ttl=hg.TTL("10s"))

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        """Drop what was seen, also within the batch."""
        is_first = batch["payment"].is_first_distinct() & ~self.seen.exists()
        self.seen.put(True, where=is_first)
        return batch.filter(is_first)


p = hg.Pipeline("first-payments", checkpointing=hg.Checkpointing(interval="1s"))
payments = p.source(
    hg.Generator(
        columns={"payment": hg.Uniform(0, 30_000), "cents": hg.Uniform(1, 10_000)}, rows=200_000, rows_per_second=5_000
    )
)
payments.key_by("payment").process(First(), name="first").sink(hg.FileSink("out/first_payments"))

if __name__ == "__main__":
    print(p.run())
