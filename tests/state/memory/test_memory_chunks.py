"""Checkpoints of state in memory that write what changed, and what is restored of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.state.memory.chunk_stories import Story, small
from tests.state.test_backends import Columns, Rows

FORMS = [Rows, Columns]

CHANGES = ["put", "put", "clear", "append", "append", "forget", "set", "set", "unset", "empty"]
HAPPENS = [
    *("freeze", "write", "complete", "checkpoint", "checkpoint", "checkpoint", "checkpoint"),
    *("fail", "abort", "drop", "tidy", "restart"),
]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(CHANGES + HAPPENS),
        st.lists(st.integers(0, 4), min_size=1, max_size=4),
        st.integers(0, 99),
    ),
    max_size=60,
)


def tell(story: Story, steps: list[tuple[str, list[int], int]]) -> None:
    """Have all that happen."""
    for what, numbers, n in steps:
        match what:
            case "freeze" if len(story.frozen) < 3:
                story.freeze()
            case "write" if story.frozen:
                story.write(n % 4)
            case "fail" if story.frozen:
                story.give_up(n % 4)
            case "complete" if story.written:
                story.complete(sorted(story.written)[n % len(story.written)], is_heard=n % 2 == 0)
            case "abort" if story.written:
                story.abort(sorted(story.written)[n % len(story.written)])
            case "checkpoint":
                while story.frozen:
                    story.write()
                story.checkpoint()
            case "drop" if len(story.retained) > 1:
                story.drop()
            case "tidy":
                story.use.tidy()
            case "restart":
                story.restart()
            case _ if what in CHANGES:
                story.change(what, numbers, n)
        story.use.check(story.model)


# MC1 MC2 MC3 MC4
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["number", "pair"])
@settings(max_examples=60)
@given(steps=STEPS, parallelism=st.integers(1, 3))
def test_whatever_becomes_of_checkpoints_each_is_restored_as_it_was(
    form: type[Rows], key: str, steps: list[tuple[str, list[int], int]], parallelism: int
) -> None:
    with small():
        story = Story(form(key), key)
        tell(story, steps)
        story.check()
        story.check(parallelism)
        story.check_no_leak()
