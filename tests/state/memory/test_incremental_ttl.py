"""State in memory that expires, and goes on with the chunks of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.state.backends import GROUPS
from tests.state.memory.chunk_stories import KEYS, Story, chunks_of, small

import headgate as hg
from headgate.state.descriptors import StateDescriptor, StateKind

VALUE = StateDescriptor("value", StateKind.VALUE, pa.int64())
LIST = StateDescriptor("list", StateKind.LIST, pa.int64())
MAP = StateDescriptor("map", StateKind.MAP, pa.int64(), pa.int64())
NAMES = ("value", "list", "map")

LATE, MANY = 180, 200

each_form = pytest.mark.parametrize("form", ["row", "column"])


class Expiring:
    """A value, a list of one element and a map of one entry for each key: when all three expire."""

    def __init__(self, form: str) -> None:
        self.form, self.ttl_ms, self.now_ms = form, 100, 0

    @property
    def states(self) -> list[StateDescriptor]:
        return [replace(one, ttl=hg.TTL(timedelta(milliseconds=self.ttl_ms))) for one in (VALUE, LIST, MAP)]

    def make(self, worker: Any) -> Any:
        of = worker.of("sum", 0, GROUPS)
        return (of.by_row if self.form == "row" else of.by_column)(KEYS, self.states)

    def nothing(self) -> dict[int, int]:
        return {}

    def counts(self, model: dict[int, int]) -> dict[str, int]:
        return dict.fromkeys(NAMES, len(self.living(model)))

    def living(self, model: dict[int, int]) -> set[int]:
        return {key for key, until_ms in model.items() if until_ms > self.now_ms}

    def process(self, backend: Any, model: dict[int, int], keys: range) -> None:
        """Give keys that have nothing something."""
        backend.time.now_ms = self.now_ms
        until_ms = self.now_ms + self.ttl_ms
        model |= dict.fromkeys(keys, until_ms)
        value, elements, entries = self.states
        if self.form == "row":
            for key in keys:
                backend.cells(value).put(key, (key, until_ms))
                backend.cells(elements).put(key, [(key, until_ms)])
                backend.cells(entries).put(key, {key: (key, until_ms)})
            return
        column = pa.array(np.array(keys), pa.int64())
        slots = backend.slots([column])
        backend.values(value).put(slots, column)
        backend.lists(elements).append(slots, column)
        backend.maps(entries).put(slots, column, column)


def told(form: str, ttl_ms: int = 100, now_ms: int = 90) -> Story:
    """Return a story that goes on with a chunk at ``now_ms``; of the keys in it, most expire at 100, others at 150.

    ``ttl_ms``: from then on.
    """
    story = Story(Expiring(form))
    story.change(range(LATE))
    story.use.now_ms = 50
    story.change(range(LATE, MANY))
    story.checkpoint()
    story.use.now_ms, story.use.ttl_ms = now_ms, ttl_ms
    story.restart()
    assert story.continued == 1
    return story


def found(story: Story, manifest: Any, now_ms: int, parallelism: int = 1) -> dict[str, set[int]]:
    """Return the keys that somebody has who restores a checkpoint later."""
    story.use.now_ms = now_ms
    contents = story.contents(manifest, parallelism)
    return {name: {row["key0"] for row in contents[name]} for name in NAMES}


def each(keys: set[int]) -> dict[str, set[int]]:
    return dict.fromkeys(NAMES, keys)


def paths(manifest: Any) -> set[str]:
    return {part.path for part in chunks_of(manifest)}


@each_form
@small()
def test_state_that_expires_goes_on_with_chunks(form: str) -> None:
    story = told(form)
    (first, _) = story.retained[story.number]
    story.change(range(MANY, MANY + 5))
    manifest = story.checkpoint()
    assert paths(first) < paths(manifest)
    for parallelism in (1, 2):
        assert found(story, manifest, 95, parallelism) == each({*range(MANY + 5)})
        assert found(story, manifest, 140, parallelism) == each({*range(LATE, MANY + 5)})
        assert found(story, manifest, 160, parallelism) == each({*range(MANY, MANY + 5)})


@each_form
@small()
def test_what_a_restore_shortens_is_written_again(form: str) -> None:
    story = told(form, ttl_ms=30)
    (first, _) = story.retained[story.number]
    manifest = story.checkpoint()
    assert paths(first) < paths(manifest)
    story.use.ttl_ms = 100
    assert found(story, manifest, 110) == each({*range(LATE, MANY)})
    assert found(story, manifest, 120) == each(set())


@each_form
@pytest.mark.parametrize("now_ms", [50, 90])
@small()
def test_what_a_restore_does_not_shorten_is_not_written_again(now_ms: int, form: str) -> None:
    story = told(form, now_ms=now_ms)
    (first, _) = story.retained[story.number]
    assert paths(story.checkpoint()) == paths(first)
