from __future__ import annotations

import pickle  # noqa: TID251 - what Spark does with user code
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate.api.launch import make_checkpoint_directory
from headgate.model import config as model
from headgate.model.graph import BAD_RECORDS, MAIN
from headgate.model.ids import NodeName
from headgate.model.plan import PipelineDefinition
from headgate.operators import user_functions
from headgate.testing import Collect, run


def simple(**options: Any) -> hg.Pipeline:
    pipeline = hg.Pipeline("simple", **options)
    pipeline.source(hg.FromRows([{"n": 1}])).filter(pl.col("n") > 0).sink(hg.Discard())
    return pipeline


def test_the_definition_holds_configuration_graph_plan_and_schemas(tmp_path: Path) -> None:
    pipeline = simple(
        parallelism=3,
        max_parallelism=16,
        checkpointing=hg.Checkpointing(interval="500ms", dir=tmp_path, retained=5),
        restart=hg.FixedDelay(attempts=2, delay="3s"),
        on_damaged_checkpoint="fail",
        on_denied_output="lose",
    )
    definition = pipeline.definition()
    assert definition.config == model.PipelineConfig(
        name="simple",
        parallelism=3,
        checkpoint_root=str(tmp_path),
        max_parallelism=16,
        checkpoints=model.CheckpointConfig(interval_ms=500, retained=5),
        restart=model.FixedDelay(2, 3_000),
        on_damaged=model.DamagedCheckpoint.FAIL,
        on_denied=model.DeniedOutput.LOSE,
    )
    assert definition.plan.parallelism == 3
    main = {MAIN: pa.schema([("n", pa.int64())])}
    source = main | {BAD_RECORDS: user_functions.BAD_RECORD_SCHEMA}
    assert definition.outputs == {NodeName("source"): source, NodeName("filter"): main, NodeName("sink"): main}


@pytest.mark.parametrize(
    ("sink", "said", "policy"),
    [
        (hg.Discard(), None, model.DamagedCheckpoint.PREVIOUS),
        (hg.Print(), None, model.DamagedCheckpoint.PREVIOUS),
        ("files", None, model.DamagedCheckpoint.FAIL),
        ("files", "previous", model.DamagedCheckpoint.PREVIOUS),
        (hg.Discard(), "fail", model.DamagedCheckpoint.FAIL),
    ],
)
def test_output_of_transactional_sinks_is_not_repeated_unless_somebody_says_so(
    tmp_path: Path, sink: Any, said: str | None, policy: model.DamagedCheckpoint
) -> None:
    pipeline = hg.Pipeline("p", on_damaged_checkpoint=said)
    source = pipeline.source(hg.FromRows([{"n": 1}]))
    source.sink(hg.Discard())
    source.sink(hg.FileSink(tmp_path) if sink == "files" else sink)
    assert pipeline.definition().config.on_damaged is policy


def test_a_dead_letter_sink_is_transactional_too(tmp_path: Path) -> None:
    found = simple(bad_records=hg.DeadLetter(hg.FileSink(tmp_path))).definition()
    assert found.config.on_damaged is model.DamagedCheckpoint.FAIL


def test_two_builds_of_one_program_agree() -> None:
    first, second = simple().definition(), simple().definition()
    assert [n.name for n in first.graph.nodes] == [n.name for n in second.graph.nodes]
    assert first.plan.state_texts() == second.plan.state_texts()


def test_the_definition_can_travel_to_workers() -> None:
    definition = simple().definition()
    assert pickle.loads(pickle.dumps(definition)).config == definition.config


def test_parallelism_is_the_pipelines_then_the_masters_then_two() -> None:
    assert simple().definition().config.parallelism == 2
    assert simple().definition(5).config.parallelism == 5
    assert simple(parallelism=3).definition(5).config.parallelism == 3
    overridden = simple(parallelism=3)
    overridden.override(parallelism=4, checkpoint_dir="/elsewhere")
    assert overridden.definition().config.parallelism == 4
    assert overridden.definition().config.checkpoint_root == "/elsewhere"


def test_the_default_checkpoint_directory_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert simple().definition().config.checkpoint_root == str(tmp_path / ".headgate" / "checkpoints")


def test_an_object_stores_url_stays_as_it_is() -> None:
    pipeline = simple(checkpointing=hg.Checkpointing(dir="s3://bucket/checkpoints"))
    assert pipeline.definition().config.checkpoint_root == "s3://bucket/checkpoints"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallelism": 0}, "parallelism must be an integer between 1 and 128"),
        ({"parallelism": 9, "max_parallelism": 8}, "between 1 and 8, but is 9"),
        ({"parallelism": True}, "parallelism must be"),
        ({"max_parallelism": 40_000}, "max_parallelism must be"),
        ({"restart": "never"}, "restart= must be headgate.NoRestart"),
        ({"checkpointing": "1s"}, "checkpointing= must be headgate.Checkpointing"),
        ({"bad_records": hg.Discard()}, r"bad_records= must be headgate.Fail\(...\) or headgate.DeadLetter"),
        ({"on_damaged_checkpoint": "ignore"}, "must be 'previous' or 'fail'"),
        ({"on_denied_output": "ignore"}, "on_denied_output must be 'fail' or 'lose', not 'ignore'"),
        ({"state": "rocksdb"}, r"state= must be headgate.Memory\(...\) or headgate.RocksDB\(...\), not 'rocksdb'"),
        ({"state": hg.RocksDB(memory="much")}, "memory of RocksDB must be a size such as '64MB'"),
        ({"state": hg.RocksDB(memory="1MB")}, "memory of RocksDB must be at least '16MB', but is '1MB'"),
        ({"state": hg.RocksDB(dir="state")}, "dir of RocksDB must be the absolute path of a directory"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hg.UsageError, match=message):
        hg.Pipeline("p", **options)


def test_a_pipeline_without_sink_is_refused() -> None:
    pipeline = hg.Pipeline("p")
    with pytest.raises(hg.UsageError, match="is empty"):
        pipeline.definition()
    rows = pipeline.source(hg.FromRows([{"n": 1}]))
    with pytest.raises(hg.UsageError, match="no sink"):
        pipeline.definition()
    rows.sink(hg.Discard())
    rows.select("n", name="forgotten")
    with pytest.raises(hg.UsageError, match="nothing reads the stream of operator 'forgotten'"):
        pipeline.definition()


def test_what_is_no_source_and_what_is_no_sink_is_explained() -> None:
    pipeline = hg.Pipeline("p")
    with pytest.raises(hg.UsageError, match="DataFrameSource"):
        pipeline.source(pl.DataFrame({"n": [1]}))  # type: ignore[arg-type]
    with pytest.raises(hg.UsageError, match="a sink such as"):
        pipeline.source(hg.FromRows([{"n": 1}])).sink("app/out")  # type: ignore[arg-type]


def test_an_unreadable_source_is_told_with_its_operator(tmp_path: Path) -> None:
    with pytest.raises(hg.UsageError, match=r"operator 'logs': .*missing does not exist"):
        hg.Pipeline("p").source(hg.TextFiles(tmp_path / "missing"), name="logs")


class PickySink(hg.Discard):
    def check(self, schema: pa.Schema) -> None:
        if schema != user_functions.BAD_RECORD_SCHEMA:
            raise hg.UsageError("it only takes bad records")


def test_a_sink_is_asked_when_the_pipeline_is_built() -> None:
    pipeline = hg.Pipeline("p", bad_records=hg.DeadLetter(PickySink()))
    with pytest.raises(hg.UsageError, match="operator 'sink': it only takes bad records"):
        pipeline.source(hg.FromRows([{"n": 1}])).sink(PickySink())


def test_describe_shows_chains_and_what_flows_between_them() -> None:
    pipeline = hg.Pipeline("shown")
    rows = pipeline.source(hg.FromRows([{"n": 1}]))
    rows.key_by("n").reduce(lambda a, b: b).sink(hg.Discard())
    text = pipeline.describe()
    assert "chain source\n  source [source] n: int64\n  key-by [operator] n: int64" in text
    assert "chain reduce\n  <- key-by, hash on n\n  reduce [operator, keeps state] n: int64" in text


def test_describe_shows_which_side_output_a_chained_operator_reads() -> None:
    pipeline = hg.Pipeline("shown", bad_records=hg.DeadLetter(hg.Discard()))
    pipeline.source(hg.FromRows([{"n": 1}])).sink(hg.Discard())
    assert "\n  bad-records [sink, from source (bad-records)] node: " in pipeline.describe()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hg.Checkpointing(interval="often"), "checkpointing interval must look like"),
        (lambda: hg.Checkpointing(retained=0), "retained must be an integer of at least 1"),
        (lambda: hg.Checkpointing(timeout=0), "timeout must be longer than zero"),
        (lambda: hg.Checkpointing(mode="twice"), "mode must be one of 'exactly_once'"),
        (lambda: hg.ExponentialDelay(multiplier=0.5), "multiplier must be a number of at least 1"),
        (lambda: hg.ExponentialDelay(multiplier=float("nan")), "multiplier must be a number of at least 1"),
        (lambda: hg.ExponentialDelay(jitter=2), "jitter must be between 0 and 1"),
        (lambda: hg.FixedDelay(attempts=-1), "attempts must be an integer of at least 0"),
        (lambda: hg.FailureRate(interval=0), "interval must be longer than zero"),
        (lambda: hg.Tumbling(0), "size must be longer than zero"),
        (lambda: hg.Tumbling("1h", zone="Europe/Berlin"), "days, weeks, months, quarters or years"),
        (lambda: hg.Tumbling("1d", zone="Berlin"), "must be the name of a time zone, such as 'Europe/Berlin'"),
        (lambda: hg.Tumbling("0mo"), "size must be longer than zero"),
        (lambda: hg.Tumbling("1d", "60h", zone="UTC"), "the offset, 60h, must be shorter than the size, 1d"),
        (lambda: hg.Sliding("5m", 0), "slide must be longer than zero"),
        (lambda: hg.Sliding("1m", "5m"), "use a slide that is at most the size"),
        (lambda: hg.Tumbling("1m", offset="1m"), "the offset, 1m, must be shorter than the size, 1m"),
        (lambda: hg.Sliding("5m", "1m", "2m"), "the offset, 2m, must be shorter than the slide, 1m"),
        (lambda: hg.DataFrameSource([1]), "needs a Spark DataFrame"),
    ],
)
def test_wrong_values_are_refused_where_they_are_written(make: Any, message: str) -> None:
    with pytest.raises(hg.UsageError, match=message):
        make()


def test_restart_strategies_are_translated_into_milliseconds() -> None:
    assert hg.NoRestart().to_config() == model.NoRestart()
    assert hg.FailureRate(5, "2m", "3s").to_config() == model.FailureRate(5, 120_000, 3_000)
    assert hg.ExponentialDelay("1s", "5m", 3.0, "10m", 0.2, 4).to_config() == model.ExponentialDelay(
        1_000, 300_000, 3.0, 600_000, 0.2, 4
    )
    assert hg.Checkpointing(interval=None).to_config().interval_ms == 0


def test_the_checkpoint_directory_is_made_for_whom_the_user_wants(tmp_path: Path) -> None:
    def started(name: str, access: str) -> int:
        pipeline = hg.Pipeline(
            name, checkpointing=hg.Checkpointing(dir=tmp_path / name), security=hg.Security(access=access)
        )
        make_checkpoint_directory(hello(pipeline).config)
        return stat.S_IMODE((tmp_path / name).stat().st_mode)

    assert started("private", "owner") == 0o700
    assert started("shared", "group") == 0o2770
    with pytest.raises(hg.UsageError, match="is not shared with its group"):
        started("private", "group")
    with pytest.raises(hg.UsageError, match="security access must be 'owner' or 'group', not 'everybody'"):
        hg.Security(access="everybody")
    with pytest.raises(hg.UsageError, match=r"security= must be headgate.Security\(...\), not 'group'"):
        hg.Pipeline("p", security="group")  # type: ignore[arg-type]


def hello(pipeline: hg.Pipeline) -> PipelineDefinition:
    pipeline.source(hg.FromRows([{"n": 1}])).sink(hg.Discard())
    return pipeline.definition()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tls": "on"}, r"security tls must be True, False or None \(all but loopback\), not 'on'"),
        ({"certificate_file": "a.pem"}, "belong together: give all three or none"),
        (
            {"certificate_file": "a", "key_file": "b", "ca_file": "c", "tls": False},
            "certificate_file has no use with tls=False",
        ),
    ],
)
def test_wrong_security_is_refused_in_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hg.UsageError, match=message):
        hg.Security(**options)


def test_security_travels_in_the_definition(tmp_path: Path) -> None:
    security = hg.Security(tls=True, certificate_file=tmp_path / "c.pem", key_file="/k.pem", ca_file="/a.pem")
    config = hello(hg.Pipeline("p", security=security)).config.security
    assert (config.tls, config.certificate_file, config.key_file) == (True, str(tmp_path / "c.pem"), "/k.pem")
    assert hello(hg.Pipeline("q")).config.security.tls is None


ROWS = [
    {"k": "a", "n": 1, "at": 1_000, "more": "x", "url": "u"},
    {"k": "b", "n": 2, "at": 2_000, "more": "y", "url": "v"},
    {"k": "a", "n": 4, "at": 3_000, "more": "z", "url": "w"},
]
TYPES = {"k": str, "n": int, "at": int, "more": str, "url": str}


def json_lines(directory: Path, **options: Any) -> hg.JsonLines:
    pl.DataFrame(ROWS).write_ndjson(directory / "in.json")
    return hg.JsonLines(directory / "in.json", TYPES, **options)


def csv(directory: Path) -> hg.CsvFiles:
    pl.DataFrame(ROWS).write_csv(directory / "in.csv")
    return hg.CsvFiles(directory / "in.csv", TYPES)


def parquet(directory: Path) -> hg.ParquetFiles:
    pl.DataFrame(ROWS).write_parquet(directory / "in.parquet")
    return hg.ParquetFiles(directory / "in.parquet")


def columns_read(p: hg.Pipeline, node: str = "source") -> list[str]:
    definition = p.definition()
    schema = next(definition.schema(each.name) for each in definition.graph.nodes if each.name == node)
    assert isinstance(schema, pa.Schema)
    return schema.names


def windowed(stream: Any) -> Any:
    windows = stream.with_timestamps("at").key_by("k").window(hg.Tumbling("10s"))
    return windows.agg(rows=pl.len(), total=pl.col("n").sum())


@pytest.mark.parametrize("source", [json_lines, csv, parquet])
def test_a_window_reads_key_time_and_values(source: Callable[[Path], Any], tmp_path: Path) -> None:
    p, sink = hg.Pipeline("p"), Collect(tmp_path / "out")
    windowed(p.source(source(tmp_path), name="source")).sink(sink)
    assert columns_read(p) == ["k", "n", "at"]
    assert columns_read(p, "key-by") == ["k", "n", "at"]
    run(p)
    assert sorted((row["k"], row["rows"], row["total"]) for row in sink.rows()) == [("a", 2, 5), ("b", 1, 2)]


def test_expressions_read_what_they_name(tmp_path: Path) -> None:
    p, sink = hg.Pipeline("p"), Collect(tmp_path / "out")
    read = p.source(parquet(tmp_path), name="source").filter(pl.col("url") != "v")
    read.with_columns(n=pl.col("n") * 2, more=pl.lit("more")).select("n", "more").sink(sink)
    assert columns_read(p) == ["n", "url"]
    run(p)
    assert sorted(row["n"] for row in sink.rows()) == [2, 8]
    assert {row["more"] for row in sink.rows()} == {"more"}


def whole(stream: Any) -> Any:
    return stream


def by_function(stream: Any) -> Any:
    return windowed(stream.map(lambda row: row, pl.Schema({"k": pl.String, "n": pl.Int64, "at": pl.Int64})))


def by_pattern(stream: Any) -> Any:
    return stream.select(pl.all())


@pytest.mark.parametrize("use", [whole, by_function, by_pattern])
def test_what_cannot_be_looked_into_reads_all(use: Callable[[Any], Any], tmp_path: Path) -> None:
    p = hg.Pipeline("p")
    use(p.source(parquet(tmp_path), name="source")).sink(Collect(tmp_path / "out"))
    assert columns_read(p) == list(TYPES)


def test_two_readers_of_a_source_get_what_either_uses(tmp_path: Path) -> None:
    p = hg.Pipeline("p")
    read = p.source(parquet(tmp_path), name="source")
    windowed(read).sink(Collect(tmp_path / "out"))
    read.select("url").sink(Collect(tmp_path / "urls"))
    assert columns_read(p) == ["k", "n", "at", "url"]


def test_required_fields_are_read_and_checked(tmp_path: Path) -> None:
    p = hg.Pipeline("p")
    windowed(p.source(json_lines(tmp_path, required=["more"]), name="source")).sink(Collect(tmp_path / "out"))
    assert columns_read(p) == ["k", "n", "at", "more"]


def test_records_are_diverted_whole(tmp_path: Path) -> None:
    p = hg.Pipeline("p", bad_records=hg.DeadLetter(Collect(tmp_path / "bad")))
    windowed(p.source(json_lines(tmp_path), name="source")).sink(Collect(tmp_path / "out"))
    assert columns_read(p) == list(TYPES)
