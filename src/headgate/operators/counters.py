"""Counters of a user's own, among the numbers of the operator that calls the function."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from headgate.errors import UsageError
from headgate.model.progress import LATE_RECORDS, OF_EVERY_NODE, NodeProgress
from headgate.operators.base import OperatorMetrics

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_OF_OPERATORS = {LATE_RECORDS, "late_versions", "timed_out", "retried"}
_TAKEN = _OF_OPERATORS | OF_EVERY_NODE | {field.name for field in fields(NodeProgress)}
"""What Headgate itself calls its numbers of an operator."""


class Counter:
    """A number that a function counts up: ``self.rejected = hg.Counter("rejected")``, then ``self.rejected.add()``.

    It is an attribute of a function object or process function, and counts once that is open. The numbers of all
    subtasks are added up, and shown with the operator's own: in the progress as ``counters``, to Prometheus as
    ``headgate_operator_events_total``. Totals of the pipeline are as exact as its guarantee: what a restart processes
    again is counted once.
    """

    def __init__(self, name: str) -> None:
        """Make a counter that begins at 0.

        Args:
            name: lower-case letters, digits and ``_``, as in ``"rejected"``. Counters of one name in one operator are
                one counter.

        Raises:
            UsageError: the name has other characters, or Headgate has a number of that name.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                f"a counter is named with 1 to 63 lower-case letters, digits or '_', a letter first, not {name!r}"
            )
        if name in _TAKEN:
            raise UsageError(f"a counter cannot be named '{name}': each operator has a number of that name already")
        self.name = name
        self._metrics: OperatorMetrics | None = None

    def add(self, amount: int = 1) -> None:
        """Count ``amount`` more.

        Raises:
            UsageError: it is not an attribute of a function object, or ``amount`` is negative or no whole number.
        """
        if not isinstance(amount, int) or isinstance(amount, bool) or amount < 0:
            raise UsageError(f"counter '{self.name}' adds a whole number from 0 on, not {amount!r}")
        if self._metrics is None:
            raise UsageError(
                f"counter '{self.name}' belongs to no operator; make it an attribute of the function object in "
                "__init__ or open, such as self.rejected = headgate.Counter('rejected')"
            )
        self._metrics.add(self.name, amount)


def has_counters(function: object) -> bool:
    """Whether ``function`` is an object with counters among its attributes."""
    return any(isinstance(value, Counter) for value in getattr(function, "__dict__", {}).values())


def bind_counters(function: Any, metrics: OperatorMetrics) -> None:
    """Have the counters of ``function``, which no other subtask uses, count in ``metrics``."""
    for value in getattr(function, "__dict__", {}).values():
        if isinstance(value, Counter):
            value._metrics = metrics
