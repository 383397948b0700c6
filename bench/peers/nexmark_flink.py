"""Flink SQL's half of ``bench/nexmark``: queries over the files, their results thrown away.

Checkpoints each second, exactly once, state in the heap, mini-batches as in the reference's configuration. First a
query runs over the small files: its results are collected, and the JVM is warm. The clock runs from the submission of
the job to its end, without the start of the JVM and the planning of the query. Runs in the environment of
``bench/peers/install.py``; its last printed line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from bench.machine import CpuMeter
from bench.nexmark_results import digest
from bench.peers.flink_sql import environment, free_port, settings
from bench.peers.install import flink_parquet

PARALLELISM = 2
INTERVAL_MS = 1_000
SIDE_ROWS = 10_000
ERROR_CHARACTERS = 2_000

COLUMNS = {
    "person": "id BIGINT, name STRING, email_address STRING, credit_card STRING, city STRING, state STRING, "
    "date_time TIMESTAMP(3), extra STRING",
    "auction": "id BIGINT, item_name STRING, description STRING, initial_bid BIGINT, reserve BIGINT, "
    "date_time TIMESTAMP(3), expires TIMESTAMP(3), seller BIGINT, category BIGINT, extra STRING",
    "bid": "auction BIGINT, bidder BIGINT, price BIGINT, channel STRING, url STRING, date_time TIMESTAMP(3), "
    "extra STRING",
}


def reference_settings(directory: str) -> dict[str, str]:
    """Return the configuration of the peer."""
    chosen = settings(
        parallelism=PARALLELISM, directory=directory, port=free_port(), checkpoint_interval_ms=INTERVAL_MS
    )
    return chosen | {
        "table.exec.mini-batch.enabled": "true",
        "table.exec.mini-batch.allow-latency": "2 s",
        "table.exec.mini-batch.size": "50000",
        "table.optimizer.distinct-agg.split.enabled": "true",
        "table.local-time-zone": "UTC",
        "pipeline.jars": ";".join(f"file://{jar}" for jar in flink_parquet()),
    }


def opened(directory: str, files: Path) -> Any:
    """Return an environment with the tables of ``files``."""
    tables = environment(reference_settings(directory))
    for kind, columns in COLUMNS.items():
        tables.execute_sql(
            f"CREATE TEMPORARY TABLE {kind} ({columns}, WATERMARK FOR date_time AS date_time - INTERVAL '4' SECOND) "
            f"WITH ('connector' = 'filesystem', 'path' = 'file://{files / kind}', 'format' = 'parquet', "
            "'parquet.utc-timezone' = 'true')"
        )
    tables.execute_sql("CREATE TEMPORARY VIEW bid_now AS SELECT *, PROCTIME() AS p_time FROM bid")
    side = Path(directory, "side.csv")
    side.write_text("".join(f"{i},{i}\n" for i in range(SIDE_ROWS)))
    tables.execute_sql(
        "CREATE TEMPORARY TABLE side_input (key BIGINT, `value` BIGINT) "
        f"WITH ('connector' = 'filesystem', 'path' = 'file://{side}', 'format' = 'csv')"
    )
    return tables


def sink_of(tables: Any, query: str, text: str, directory: str) -> str:
    """Make the table that takes the results, with their columns; return its definition."""
    columns = ", ".join(f"`{name}` {kind}" for name, kind in _types(tables, text).items())
    if query == "q10":
        return (
            f"CREATE TEMPORARY TABLE target ({columns}) PARTITIONED BY (dt, hm) WITH ('connector' = 'filesystem', "
            f"'path' = 'file://{directory}/out', 'format' = 'csv', "
            "'sink.partition-commit.trigger' = 'partition-time', 'sink.partition-commit.delay' = '1 min', "
            "'sink.partition-commit.policy.kind' = 'success-file', "
            "'partition.time-extractor.timestamp-pattern' = '$dt $hm:00', "
            "'sink.rolling-policy.rollover-interval' = '1min', 'sink.rolling-policy.check-interval' = '1min')"
        )
    return f"CREATE TEMPORARY TABLE target ({columns}) WITH ('connector' = 'blackhole')"


def results(query: str, text: str, files: Path) -> dict[str, Any]:
    """Run to the end and return how many rows are left of the results, and their digest.

    Rows come as texts all at once: one by one, each would take several calls between Python and the JVM.
    """
    from pyflink.java_gateway import get_gateway

    directory = tempfile.mkdtemp(prefix="headgate-peer-")
    tables = opened(directory, files)
    types = _types(tables, text)
    pairs = ", ".join(f"KEY '{name}' VALUE {_as_json(name, kind)}" for name, kind in types.items())
    found = tables.execute_sql(f"SELECT JSON_OBJECT({pairs} NULL ON NULL) AS found FROM ({text})")
    collected = get_gateway().jvm.org.apache.flink.util.CollectionUtil.iteratorToList(found._j_table_result.collect())
    left: Counter[str] = Counter()
    for kind, row in rows_of(collected.toString()):
        left[row] += 1 if kind in ("+I", "+U") else -1
    shutil.rmtree(directory, ignore_errors=True)
    assert min(left.values(), default=1) >= 0, "no row goes that was not there"
    return digest(query, (_read(json.loads(row), types) for row in left.elements()))


def rows_of(printed: str) -> Iterator[tuple[str, str]]:
    """Return the kind and the JSON of the rows of a printed list: ``[+I[{"a":1}], -U[{"a":1}]]``."""
    decoder, place = json.JSONDecoder(), 1
    while place < len(printed) - 1:
        kind, start = printed[place : place + 2], place + 3
        _, end = decoder.raw_decode(printed, start)
        yield kind, printed[start:end]
        place = end + len("], ")


def measure(query: str, text: str, files: Path) -> dict[str, float]:
    """Run to the end; return the seconds by the clock and of processor time."""
    directory = tempfile.mkdtemp(prefix="headgate-peer-")
    tables = opened(directory, files)
    tables.execute_sql(sink_of(tables, query, text, directory))
    job = tables.execute_sql(f"INSERT INTO target {text}")
    meter, began_s = CpuMeter(), time.monotonic()
    job.wait()
    found = {"s": time.monotonic() - began_s, "cpu_s": meter.cpu_seconds()}
    shutil.rmtree(directory, ignore_errors=True)
    return found


def of_query(query: str, text: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check one query, then measure it; one that fails is an ``error`` and leaves the others alone."""
    small = options.check_files / "whole"
    try:
        found = results(query, text, small)
        return found | {"turns": [measure(query, text, options.files / "whole") for _ in range(options.turns)]}
    except Exception as error:  # whatever Flink says
        return {"error": str(error).strip()[:ERROR_CHARACTERS]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run queries one after another; print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=json.loads, help="the queries in SQL, by name, as JSON")
    parser.add_argument("--files", type=Path, required=True)
    parser.add_argument("--check-files", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=1)
    options = parser.parse_args(arguments)
    try:
        import pyflink  # noqa: F401
    except ImportError:
        sys.exit("apache-flink is not installed in this environment: run `make bench-peers`")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    found: dict[str, dict[str, Any]] = {}
    for query, text in options.texts.items():
        found[query] = of_query(query, text, options)
        print(query, json.dumps(found[query]), flush=True)
    print(json.dumps(found), flush=True)


def _types(tables: Any, text: str) -> dict[str, str]:
    """Return the types of the result columns as a sink can have them: without the role of event time."""
    from pyflink.table.types import _to_java_data_type

    schema = tables.sql_query(text).get_resolved_schema()
    kinds = (_to_java_data_type(kind).getLogicalType() for kind in schema.get_column_data_types())
    texts = (str(kind.asSerializableString()).replace(" NOT NULL", "") for kind in kinds)
    return dict(zip(schema.get_column_names(), texts, strict=True))


def _as_json(name: str, kind: str) -> str:
    return f"CAST(`{name}` AS STRING)" if kind.startswith(("DECIMAL", "TIMESTAMP")) else f"`{name}`"


def _read(row: dict[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    readers: dict[str, Callable[[str], object]] = {"DECIMAL": Decimal, "TIMESTAMP": datetime.fromisoformat}
    for name, kind in types.items():
        reader = readers.get(kind.partition("(")[0])
        if reader is not None and row[name] is not None:
            row[name] = reader(row[name])
    return row


if __name__ == "__main__":
    main()
