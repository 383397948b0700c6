"""What a failing user function becomes: one error with the operator, the record and the user's own frames (OP3)."""

from __future__ import annotations

import copy
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from headgate.errors import HeadgateError
from headgate.operators.sendable import unsendable

_RECORD_CHARS_MAX = 1_000
_OWN_CODE = str(Path(__file__).resolve().parents[1])


class UserFunctionError(HeadgateError):
    """A user's function or expression failed.

    Attributes:
        node: name of the operator.
        record: shortened repr of the record, or a description of the batch.
        traceback_text: Python traceback without Headgate's own frames.
    """

    def __init__(self, node: str, record: str, traceback_text: str) -> None:
        super().__init__(node, record, traceback_text)
        self.node = node
        self.record = record
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        return f"the function of operator '{self.node}' failed on {self.record}\n{self.traceback_text}"


class HookError(UserFunctionError):
    """A method that a checkpoint calls failed; ``record`` names it, with the checkpoint if there is one.

    Attributes:
        may_pass: it acts outside, where things may be in order later (HL6).
    """

    def __init__(self, node: str, record: str, traceback_text: str, may_pass: bool = True) -> None:
        super().__init__(node, record, traceback_text)
        self.args = (node, record, traceback_text, may_pass)
        self.may_pass = may_pass

    def __str__(self) -> str:
        return f"{self.record} of operator '{self.node}' failed\n{self.traceback_text}"


def copied(node: str, function: Any) -> Any:
    """Return a copy of a user's function object: neither subtasks nor the driver share one (ST1).

    Raises:
        UsageError: it cannot be copied, hence not be sent to a worker either.
    """
    try:
        return copy.deepcopy(function)
    except Exception as error:
        raise unsendable(node, function, copy.deepcopy, error) from None


def shortened(value: object) -> str:
    """Return a repr of bounded length."""
    try:
        text = repr(value)
    except Exception as error:  # a user's __repr__ must not hide the user's error
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= _RECORD_CHARS_MAX else text[:_RECORD_CHARS_MAX] + "…"


def user_error(node: str, record: object, error: BaseException) -> UserFunctionError:
    """Return the error to raise for ``error``, which left the user's function called with ``record``."""
    return UserFunctionError(node, shortened(record), user_traceback(error))


def batch_error(node: str, rows: int, error: BaseException) -> UserFunctionError:
    """Return the error to raise for ``error``, which left a function or expression on a batch."""
    return UserFunctionError(node, f"a batch of {rows} records", user_traceback(error))


def user_traceback(error: BaseException) -> str:
    """Return a traceback of ``error`` that starts at the first frame outside Headgate."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_OWN_CODE):
        frame = frame.tb_next
    lines = traceback.format_exception_only(error)
    if frame is not None:
        lines = ["Traceback (most recent call last):\n", *_formatted(frame), *lines]
    return "".join(lines).rstrip()


def _formatted(frames: TracebackType) -> list[str]:
    """Return the frames as Python prints them; without marks in the lines where those cannot be had.

    For its marks Python parses each line, and before 3.11.8 and 3.12.2 that fails with SystemError where another
    thread's traceback is formatted in between (CPython gh-106905). A user's error must not be lost to that.
    """
    try:
        return traceback.format_tb(frames)
    except SystemError:
        found = traceback.extract_tb(frames)
        return traceback.format_list([(one.filename, one.lineno or 0, one.name, one.line) for one in found])
