"""A first pipeline, with nothing to prepare: generated orders, revenue per shop and second, as JSON-lines files.

    headgate run examples/windowed_counts.py

Stop it with Ctrl-C and run it again: it continues where it stopped, and ``out/revenue`` has every order exactly once.
"""

import polars as pl

import headgate as hg

SHOPS = ("Amsterdam", "Berlin", "Cairo", "Delhi")

p = hg.Pipeline("windowed-counts", checkpointing=hg.Checkpointing(interval="1s"))
orders = p.source(
    hg.Generator(
        columns={"shop": hg.Choice(SHOPS), "cents": hg.Uniform(100, 10_000)}, rows=200_000, rows_per_second=20_000
    )
)
revenue = (
    orders.filter(pl.col("cents") >= 500)
    .with_timestamps("ts")
    .key_by("shop")
    .window(hg.Tumbling("1s"))
    .agg(orders=pl.len(), cents=pl.col("cents").sum())
)
revenue.sink(hg.FileSink("out/revenue"))

if __name__ == "__main__":
    print(p.run())
