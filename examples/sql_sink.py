"""Totals in a table of a database, which an upsert of each total keeps up to date, and all orders in another one.

    headgate run examples/sql_sink.py -- sqlite:////tmp/shop.db

Each order is counted once, and is in the table ``orders`` once, whichever process dies. Any database works that
SQLAlchemy knows; for PostgreSQL there is ``headgate.PostgresSink``.
"""

import os
import sys

import polars as pl

import headgate as hg


def pipeline() -> hg.Pipeline:
    """Return the pipeline; ``headgate run`` calls this."""
    url = sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{os.path.abspath('shop.db')}"
    p = hg.Pipeline("sql-sink", checkpointing=hg.Checkpointing(interval="1s"))
    generated = hg.Generator(
        {"id": hg.RowNumber(), "customer": hg.Uniform(0, 100), "amount": hg.Uniform(1, 50)},
        rows=20_000,
        rows_per_second=5_000,
    )
    orders = p.source(generated).select("id", "customer", "amount")
    orders.sink(hg.SqlSink(url, "orders", create=True), name="orders")
    totals = orders.key_by("customer").agg(orders=pl.len(), amount=pl.col("amount").sum())
    totals.sink(hg.SqlSink(url, "totals", upsert="customer", create=True), name="totals")
    return p


if __name__ == "__main__":
    print(pipeline().run())
