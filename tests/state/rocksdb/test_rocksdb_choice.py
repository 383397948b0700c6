"""Which backend a pipeline has: what users say, what a worker makes of it, and what is told when it cannot be."""

from __future__ import annotations

from typing import Any

import pytest

import headgate as hg
from headgate.model.config import MemoryState, RocksState, size_bytes
from headgate.state import choice
from headgate.state.memory.factory import MemoryStates
from headgate.state.rocksdb.factory import RocksStates


def state_of(**options: Any) -> Any:
    made = hg.Pipeline("p", **options)
    made.source(hg.FromRows([{"n": 1}])).sink(hg.Discard())
    return made.definition().config.state


def test_a_pipeline_says_where_its_state_is() -> None:
    assert state_of() == state_of(state=hg.Memory()) == state_of(state_backend="memory") == MemoryState()
    assert state_of(state=hg.RocksDB()) == RocksState(512 << 20)
    assert state_of(state=hg.RocksDB(memory="2GB", dir="/disk")) == RocksState(2 << 30, "/disk")


def test_a_worker_has_the_state_that_the_pipeline_says() -> None:
    assert isinstance(choice.worker_states(MemoryState(), None).of("node", 0, 128), MemoryStates)
    rocks = choice.worker_states(RocksState(16 << 20), None)
    assert isinstance(rocks.of("node", 0, 128), RocksStates)
    rocks.close()


def test_a_library_that_is_missing_is_named_in_the_driver_and_on_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    told = r"headgate.RocksDB needs the package rocksdict, .*: pip install 'headgate\[rocksdb\]'"
    with pytest.raises(hg.UsageError, match=told):
        hg.Pipeline("p", state=hg.RocksDB())
    with pytest.raises(hg.UsageError, match=told):
        choice.worker_states(RocksState(16 << 20), None)


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
