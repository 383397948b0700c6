from __future__ import annotations

from collections.abc import Callable

import pytest

from headgate.environment import ThreadEnded, close_all

CALLS: list[str] = []


def closes(*answers: BaseException | None) -> list[Callable[[], object]]:
    """One call for each answer: it raises it, or nothing."""
    CALLS.clear()

    def close(number: int, answer: BaseException | None) -> None:
        CALLS.append(f"close {number}")
        if answer is not None:
            raise answer

    return [lambda n=number, a=answer: close(n, a) for number, answer in enumerate(answers)]  # type: ignore[misc]


def test_everything_is_closed_and_the_first_error_is_told() -> None:  # N73
    first = SystemExit(3)
    with pytest.raises(SystemExit) as raised:
        close_all(closes(None, first, OSError("second"), None))
    assert raised.value is first
    assert CALLS == ["close 0", "close 1", "close 2", "close 3"]


def test_nothing_fails_where_nothing_fails() -> None:
    close_all(closes(None, None))
    assert CALLS == ["close 0", "close 1"]


def test_a_thread_that_ends_closes_nothing_more() -> None:
    with pytest.raises(ThreadEnded):
        close_all(closes(OSError("first"), ThreadEnded(), None))
    assert CALLS == ["close 0", "close 1"]
