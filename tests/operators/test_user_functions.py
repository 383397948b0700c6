"""What in a function cannot be sent to the workers is named."""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import pytest
from pyspark import cloudpickle

from headgate.operators.user_functions import unpicklable_part, user_traceback

LOCK = threading.Lock()


def by_global(row: object) -> object:
    with LOCK:
        return row


def by_variable() -> Callable[[Any], Any]:
    lock = threading.Lock()

    def inner(row: object) -> object:
        with lock:
            return row

    return inner


class Keeps:
    def __init__(self, lock: object) -> None:
        self.name, self.parts = "a", {"first": 1, "lock": lock}

    def method(self, row: object) -> object:
        return row


class UsesGlobal:
    def __call__(self, row: object) -> object:
        return by_global(row)


@dataclass(frozen=True, slots=True)
class Slotted:
    number: int
    stream: object


def test_the_part_that_cannot_be_sent_is_named() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as the program that a user runs
    try:
        lock = threading.Lock()
        told = {
            "global": unpicklable_part(by_global, cloudpickle.dumps),
            "closure": unpicklable_part(by_variable(), cloudpickle.dumps),
            "attribute": unpicklable_part(Keeps(lock), cloudpickle.dumps),
            "method": unpicklable_part(Keeps(lock).method, cloudpickle.dumps),
            "argument": unpicklable_part(functools.partial(by_variable, lock), cloudpickle.dumps),
            "of another": unpicklable_part(UsesGlobal(), cloudpickle.dumps),
            "slot": unpicklable_part([Slotted(1, sys.stderr.buffer)], cloudpickle.dumps),
            "itself": unpicklable_part(lock, cloudpickle.dumps),
        }
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert told["global"] == "function by_global, variable LOCK: a _thread.lock"
    assert told["closure"] == "function inner, variable lock: a _thread.lock"
    assert told["attribute"] == "Keeps, attribute parts, item 'lock': a _thread.lock"
    assert told["method"] == "Keeps, attribute parts, item 'lock': a _thread.lock"
    assert told["argument"] == "an argument: a _thread.lock"
    assert told["of another"] == (
        "UsesGlobal, function UsesGlobal.__call__, variable by_global, function by_global, "
        "variable LOCK: a _thread.lock"
    )
    assert "attribute stream: a " in told["slot"]
    assert told["itself"] == "a _thread.lock"


def test_an_object_that_holds_itself_ends() -> None:
    class Circle:
        def __init__(self) -> None:
            self.me: Any = self

    def refuse(_: object) -> None:
        raise TypeError("never")

    assert unpicklable_part(Circle(), refuse).startswith("Circle")


def test_a_variable_that_has_no_value_yet_is_passed_over() -> None:
    def later() -> object:
        return unknown

    with pytest.raises(NameError):
        later()
    assert unpicklable_part(later, _refuse_functions).startswith("function later")
    unknown = 1


def _refuse_functions(value: object) -> None:
    if callable(value):
        raise TypeError("a function")


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
