"""Plain Python on records: parse JSON lines with ``flat_map``, keep a running total per key with ``reduce``.

    printf '%s\\n' '{"user": "ann", "amount": 3}' 'not json' '{"user": "ann", "amount": 4}' > /tmp/payments.txt
    headgate run examples/row_functions.py -- /tmp/payments.txt

Lines that are not JSON make no record, and totals are printed as they grow. Each call receives one record as a dict.
For speed, prefer Polars expressions (``filter``, ``select``, ``with_columns``, ``agg``) wherever they are sufficient.
"""

import json
import sys
from collections.abc import Iterator

import headgate as hg


def parse(row: dict) -> Iterator[dict]:
    """Yield the payment in a line, or nothing."""
    try:
        payment = json.loads(row["line"])
        yield {"user": str(payment["user"]), "amount": int(payment["amount"]), "payments": 1}
    except (ValueError, KeyError, TypeError):
        return


def add(total: dict, payment: dict) -> dict:
    """Return the total so far with one more payment."""
    return {
        "user": total["user"],
        "amount": total["amount"] + payment["amount"],
        "payments": total["payments"] + payment["payments"],
    }


def pipeline() -> hg.Pipeline:
    """Return the pipeline; ``headgate run`` calls this."""
    p = hg.Pipeline("row-functions")
    lines = p.source(hg.TextFiles(sys.argv[1:]))
    payments = lines.flat_map(parse, schema={"user": str, "amount": int, "payments": int})
    payments.key_by("user").reduce(add).sink(hg.Print())
    return p


if __name__ == "__main__":
    print(pipeline().run())
