"""The traceback of a user's error is there also where Python cannot mark the places in its lines."""

from __future__ import annotations

import traceback
from types import TracebackType

import pytest

from headgate.operators.user_functions import user_traceback


def _failing() -> ZeroDivisionError:
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError as error:
        return error
    raise AssertionError("it must fail")


def test_the_users_frames_are_shown_without_marks_where_python_cannot_parse_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = _failing()
    marked = user_traceback(error)

    def broken(_: TracebackType) -> list[str]:
        raise SystemError("AST constructor recursion depth mismatch (before=141, after=159)")

    monkeypatch.setattr(traceback, "format_tb", broken)
    lines = [line for line in marked.splitlines() if line.strip(" ^~")]
    assert user_traceback(error).splitlines() == lines
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: division by zero"
