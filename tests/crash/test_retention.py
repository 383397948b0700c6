"""A stream whose retention keeps nothing, between a producer and a pipeline whose workers are killed."""

# Rules: F1

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from crash.processes import Life, kill, until
from headgate.store.store import Store
from headgate.store.streams import TEXT_SCHEMA, Retention

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

WORDS = 3


@contextmanager
def producing(root: Path, is_over: threading.Event) -> Iterator[list[int]]:
    """Append numbered lines until it is over, then seal the stream; gives how many there were."""
    counts = [0]

    def produce() -> None:
        with Store.open(root) as store:
            with store.writer("lines") as writer:
                while not is_over.wait(0.01):  # the pace: not a wait for anything
                    lines = [" ".join(f"{n}-{word}" for word in range(WORDS)) for n in range(counts[0], counts[0] + 20)]
                    writer.append(pa.record_batch([pa.array(lines, pa.large_string())], schema=TEXT_SCHEMA))
                    counts[0] += 20
            store.seal("lines")

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield counts
    finally:
        is_over.set()
        thread.join()


def found_words(store: Store) -> Counter[str]:
    found: Counter[str] = Counter()
    for segment in range(store.describe("words").segments_count):
        reader = store.reader("words", segment)
        while (batch := reader.read()) is not None:
            found.update(batch.column("word").to_pylist())
    return found


def test_workers_are_killed_while_the_input_is_truncated(
    spec: Callable[..., dict[str, Any]], run: Callable[[dict[str, Any]], Life], tmp_path: Path
) -> None:
    is_over = threading.Event()
    with Store.open(tmp_path / "store") as store:
        store.create_stream("lines", TEXT_SCHEMA, segments=3)
        with producing(tmp_path / "store", is_over) as counts:
            life = run(spec("stream_to_stream", follow=True))
            generation = 0
            for _ in range(3):
                running = life.running(after=generation)
                generation = running["generation"]
                life.checkpoint()
                store.set_retention("lines", Retention(age="1ms"))
                before = sum(store.head("lines").positions.values())
                until(lambda: sum(store.retain("lines").positions.values()) > before, "the input to be truncated")  # noqa: B023
                kill(next(iter(running["workers"].values())))
                life.restart()
            is_over.set()
            life.result()
        expected = Counter(f"{n}-{word}" for n in range(counts[0]) for word in range(WORDS))
        assert found_words(store) == expected
        assert store.describe("lines").events_count < counts[0]
        assert [problem for problem in store.fsck() if not problem.is_harmless] == []
