"""The main job: count log lines per level and service in tumbling windows, exactly once.

    headgate streams create app/logs
    headgate run examples/log_errors.py

or directly, with all options:

    python examples/log_errors.py --window 5m --levels ERROR

It reads lines of Spark, Hadoop, ZooKeeper and other log4j programs. All other lines go to the stream ``app/unparsed``,
also exactly once. ``make demo`` runs this program and kills it while it works.
"""

from __future__ import annotations

import argparse

import polars as pl

import headgate as hg

# Each known beginning of a line is brought to one form: "2015-07-29 17:41:44,747 INFO …".
SPARK_DATE = r"^(\d\d)/(\d\d)/(\d\d) (\d\d:\d\d:\d\d)"  # 17/06/09 20:10:40 INFO …
HDFS_DATE = r"^(\d\d)(\d\d)(\d\d) (\d\d)(\d\d)(\d\d) \d+"  # 081109 203615 148 INFO …
HEAD = r"^(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[,.]\d+)?(?: -)?\s+(TRACE|DEBUG|INFO|WARN|ERROR|FATAL)\s+(.*)$"
PLAIN_SERVICE = r"^(?:\[[^\]]*\] )?([\w.$]+)(?::| -)"  # executor.Executor: … or [main] org.x.Y - …
ZOOKEEPER_SERVICE = r"^\[.*:([\w$]+)@\d+\]"  # [QuorumPeer[myid=1]/0:0:0:0:0:0:0:0:2181:FastLeaderElection@774] - …


def pipeline(arguments: list[str] | None = None) -> hg.Pipeline:
    """Return the pipeline; ``headgate run`` calls this."""
    options = parse_options(arguments)
    p = hg.Pipeline(
        "log-errors",
        checkpointing=hg.Checkpointing(interval="1s", dir=options.checkpoints),
        bad_records=hg.DeadLetter(hg.StreamSink("app/unparsed", store=options.store)),
    )
    line = pl.col("line").str.replace(SPARK_DATE, "20${1}-${2}-${3} ${4}")
    line = line.str.replace(HDFS_DATE, "20${1}-${2}-${3} ${4}:${5}:${6}")
    rest = line.str.extract(HEAD, 4)
    time = pl.concat_str(line.str.extract(HEAD, 1), line.str.extract(HEAD, 2), separator=" ")
    service = pl.coalesce(rest.str.extract(ZOOKEEPER_SERVICE, 1), rest.str.extract(PLAIN_SERVICE, 1))

    lines = p.source(hg.StreamSource("app/logs", store=options.store))
    counts = (
        lines.select(
            line=pl.col("line"),
            level=line.str.extract(HEAD, 3),
            service=service,
            ts=pl.when(service.is_not_null()).then(time.str.to_datetime("%Y-%m-%d %H:%M:%S", strict=False)),
        )
        .with_timestamps("ts", out_of_orderness=options.out_of_orderness)  # lines without a time are diverted here
        .filter(pl.col("level").is_in(options.levels.split(",")))
        .key_by("level", "service")
        .window(hg.Tumbling(options.window))
        .agg(lines=pl.len(), last=pl.col("ts").max())
    )
    counts.sink(hg.StreamSink("app/error-counts", store=options.store))
    return p


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of ``arguments``."""
    parser = argparse.ArgumentParser(description="Count log lines per level and service, exactly once.")
    parser.add_argument("--store", help="directory of the stream store")
    parser.add_argument("--checkpoints", help="directory of the checkpoints")
    parser.add_argument("--levels", default="ERROR", help="levels to count, separated by commas")
    parser.add_argument("--window", default="5m", help="size of the windows")
    parser.add_argument("--out-of-orderness", default="5s", help="how late a line may come")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    print(pipeline().run())
