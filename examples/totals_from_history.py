"""Totals per customer that include years of payments that no stream holds any more: their state comes from a frame.

    python examples/totals_from_history.py                 # writes a savepoint, and runs from it
    headgate state show totals-from-history totals -n 5    # totals, history included

A batch job computes the state that the pipeline would have if it had processed the history: the sum of each customer.
This becomes the state of the operator "totals", and the pipeline continues from there with new payments. If you run it
again, it continues from its own checkpoints, and the savepoint is no longer needed.
"""

import os

import polars as pl
import pyarrow as pa

import headgate as hg

SAVEPOINT = "out/totals_from_history/savepoint"


class Totals(hg.BatchProcessFunction):
    """Adds up what each customer paid."""

    schema = {"customer": pa.int64(), "total": pa.int64()}

    def open(self, state: hg.BatchStateHandle) -> None:
        """Declare."""
        self.total = state.value("total", pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        """Pass on each total that has changed."""
        is_changed = self.total.update(batch["cents"], "add")
        return batch.select("customer", total=self.total.get()).filter(is_changed)


def history() -> pl.DataFrame:
    """Return the totals of the past, a row for each customer; here they are made up."""
    payments = pl.DataFrame({"customer": pl.arange(100_000, eager=True) % 1_000, "cents": 100})
    return payments.group_by("customer").agg(value=pl.col("cents").sum())


p = hg.Pipeline("totals-from-history", checkpointing=hg.Checkpointing(interval="1s"))
payments = p.source(
    hg.Generator(columns={"customer": hg.Uniform(0, 1_000), "cents": hg.Uniform(1, 10_000)}, rows=200_000),
    name="payments",
)
totals = payments.key_by("customer").process(Totals(), name="totals")
totals.sink(hg.FileSink("out/totals_from_history/totals"))

if __name__ == "__main__":
    if not os.path.exists(f"{SAVEPOINT}/savepoint"):
        print(hg.new_savepoint(p, SAVEPOINT).with_state("totals", "total", history()).write())
    print(p.run(restore=SAVEPOINT))
