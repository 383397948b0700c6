"""Which backend a pipeline has: what users say, what a worker makes of it, and what is told when it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.spark.stateful_processor.stateful_processors import Sessions

import headgate as hg
from headgate.model.config import MemoryState, RocksState, size_bytes
from headgate.state import worker_backends
from headgate.state.rocksdb.local_databases import RocksStates
from headgate.state.worker_backends import MemoryStates


def state_of(**options: Any) -> Any:
    made = hg.Pipeline("p", **options)
    made.source(hg.FromRows([{"n": 1}])).sink(hg.Discard())
    return made.definition().config.state


def test_a_pipeline_says_where_its_state_is() -> None:
    assert state_of() == state_of(state=hg.Memory()) == MemoryState()
    assert state_of(state=hg.RocksDB()) == RocksState(512 << 20)
    assert state_of(state=hg.RocksDB(memory="2GB", dir="/disk")) == RocksState(2 << 30, "/disk")


def test_a_worker_has_the_state_that_the_pipeline_says() -> None:
    assert isinstance(worker_backends.worker_states(MemoryState(), None).of("node", 0, 128), MemoryStates)
    rocks = worker_backends.worker_states(RocksState(16 << 20), None)
    assert isinstance(rocks.of("node", 0, 128), RocksStates)
    rocks.close()


def test_a_library_that_is_missing_is_named_in_the_driver_and_on_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_backends, "find_spec", lambda name: None)
    told = r"headgate.RocksDB needs the package rocksdict, .*: pip install 'headgate-streams\[rocksdb\]'"
    with pytest.raises(hg.UsageError, match=told):
        hg.Pipeline("p", state=hg.RocksDB())
    with pytest.raises(hg.UsageError, match=told):
        worker_backends.worker_states(RocksState(16 << 20), None)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MB", 64 << 20), ("1.5 gb", 3 << 29), ("2GiB", 2 << 30), ("10k", 10_240), ("7", 7), ("7B", 7), (512, 512)],
)
def test_sizes_are_multiples_of_1024(text: Any, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1XB", -1, True, None, "1MBB"])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(hg.UsageError, match="memory must be a size such as '64MB' or '2GB', or a number of bytes"):
        size_bytes(text, "memory")


class Count(hg.ProcessFunction):
    """Counts the records of a key."""

    schema = {"n": pa.int64(), "count": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> list[dict[str, Any]]:
        self.count.put(self.count.get(0) + 1)
        return [{"n": row["n"], "count": self.count.get()}]


def several(**options: Any) -> hg.Pipeline:
    """Return a pipeline whose operators have their state in several places."""
    made = hg.Pipeline("p", **options)
    rows = made.source(hg.FromRows([{"n": 1, "ts": 5}, {"n": 1, "ts": 7}, {"n": 2, "ts": 9}]))
    rows.key_by("n").process(Count(), name="large", state=hg.RocksDB(memory="32MB")).sink(hg.Discard())
    rows.key_by("n").process(Count(), name="small", state=hg.Memory()).sink(hg.Discard())
    rows.key_by("n").reduce(lambda _, row: row, name="last", state=hg.RocksDB(memory="32MB")).sink(hg.Discard())
    timed = rows.with_timestamps("ts").key_by("n")
    timed.window(hg.Tumbling("1m"), state=hg.RocksDB()).agg(count=pl.len(), name="windows").sink(hg.Discard())
    processed = rows.key_by("n").transform_with_state(Sessions(), "n INT", name="processed", state=hg.Memory())
    processed.sink(hg.Discard())
    rows.key_by("n").process(Count(), name="as-the-others").sink(hg.Discard())
    return made


def test_an_operator_may_say_where_its_own_state_is() -> None:
    config = several().definition().config
    large, windows = RocksState(32 << 20), RocksState(512 << 20)
    said = {"large": large, "small": MemoryState(), "last": large, "windows": windows, "processed": MemoryState()}
    assert dict(config.operator_states) == said
    worker = worker_backends.worker_states(RocksState(16 << 20), None, config.operator_states)
    found = {node: worker.of(node, 0, 128) for node in ("large", "small", "last", "windows", "as-the-others")}
    kinds = {node: type(states) for node, states in found.items()}
    assert kinds == {**dict.fromkeys(found, RocksStates), "small": MemoryStates}
    rooms = {node: states._databases for node, states in found.items() if isinstance(states, RocksStates)}
    assert rooms["large"] is rooms["last"], "operators that say the same share the memory of it"
    assert len({id(room) for room in rooms.values()}) == 3
    worker.close()


def test_whoever_looks_at_a_stream_keeps_what_its_operators_say() -> None:
    made = several()
    nodes = [node.name for node in made._builder.nodes if node.name == "last"]
    assert made._builder.upstream_of(nodes).states == {"last": RocksState(32 << 20)}


@pytest.mark.parametrize("state", ["rocksdb", hg.RocksDB, 5])
def test_what_is_no_state_of_an_operator_is_told_and_nothing_is_added(state: Any) -> None:
    made = hg.Pipeline("p")
    keyed = made.source(hg.FromRows([{"n": 1, "ts": 1}])).with_timestamps("ts").key_by("n")
    before = len(made._builder.nodes)
    calls: list[Callable[[], object]] = [
        lambda: keyed.process(Count(), state=state),
        lambda: keyed.transform_with_state(Sessions(), "n INT", state=state),
        lambda: keyed.transform_with_state_in_pandas(Sessions(), "n INT", state=state),
        lambda: keyed.reduce(lambda _, row: row, state=state),
        lambda: keyed.window(hg.Tumbling("1m"), state=state),
    ]
    for call in calls:
        with pytest.raises(hg.UsageError, match="state"):
            call()
    assert len(made._builder.nodes) == before
