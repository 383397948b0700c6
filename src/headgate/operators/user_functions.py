"""Functions of users: their errors, their copies, what in them cannot be sent to the workers; and bad records.

A bad record either fails the pipeline (the default) or goes to the dead-letter sink, within the same checkpoint as
the records around it, so that it is counted exactly once, too.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.errors import HeadgateError, UsageError
from headgate.model.plan import PipelineDefinition
from headgate.operators.base import Operator
from headgate.operators.counters import bind_counters, has_counters
from headgate.operators.python_times import as_numbers, unreadable_rows, why_unreadable
from headgate.plain_text import encodable, printable

DEPTH_MAX = 8
"""Objects in objects: deeper ones are named by what they are in."""

CHILDREN_MAX = 1_000
"""So many parts of one object are tried."""


def pickled(definition: PipelineDefinition, send: Callable[[Any], bytes]) -> bytes:
    """Return ``definition`` as ``send`` pickles it for the workers.

    Raises:
        UsageError: it cannot be pickled; names the operator, the function and what in it is the reason.
    """
    try:
        return send(definition)
    except Exception as error:
        for node in definition.graph.nodes:
            if _is_refused(node.spec, send):
                raise unsendable_error(str(node.name), node.spec, send, error) from error
        raise UsageError(
            f"pipeline '{definition.config.name}' cannot be sent to its workers: {unpicklable_part(definition, send)} "
            f"cannot be pickled ({error})"
        ) from error


def unsendable_error(node: str, spec: object, send: Callable[[Any], object], error: Exception) -> UsageError:
    """Return the error to raise because ``send`` refused ``spec`` of operator ``node`` with ``error``."""
    return UsageError(
        f"operator '{node}' cannot be sent to the workers: {unpicklable_part(spec, send)} cannot be pickled ({error}); "
        "what a function refers to is copied for each worker, so make files, locks and connections inside the "
        "function, or in open() of a process function"
    )


def unpicklable_part(value: object, send: Callable[[Any], object]) -> str:
    """Return what in ``value`` cannot be sent, such as ``function enrich, variable lock: a _thread.lock``.

    Args:
        value: what ``send`` has refused.
        send: raises if its argument cannot be sent.
    """
    steps, found = _innermost(value, send)
    kind = type(found)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{', '.join(steps)}: a {name}" if steps else f"a {name}"


def _innermost(value: object, send: Callable[[Any], object]) -> tuple[list[str], object]:
    steps = _named(value)
    for _ in range(DEPTH_MAX):
        refused = next((child for child in _some(value) if _is_refused(child[1], send)), None)
        if refused is None:
            break
        step, value = refused
        steps += [step] if step else []
        steps += _named(value)
    return steps, value


def _named(value: object) -> list[str]:
    """Return how a user calls ``value``, if it has a name: Headgate's own objects have none."""
    if inspect.isfunction(value):
        return [f"function {value.__qualname__.rpartition('<locals>.')[2]}"]
    kind = type(value)
    is_own = kind.__module__.startswith(("headgate.", "builtins", "functools", "_"))
    return [] if is_own or not hasattr(value, "__dict__") or isinstance(value, type) else [kind.__name__]


def _some(value: object) -> Iterator[tuple[str, object]]:
    for number, child in enumerate(_children(value)):
        if number == CHILDREN_MAX:
            return
        yield child


def _children(value: object) -> Iterator[tuple[str, object]]:
    """Return the parts of ``value`` that travel with it, and what to call each of them; "" for Headgate's own."""
    if inspect.isfunction(value):
        code = value.__code__
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # it has no value yet
                yield f"variable {name}", cell.cell_contents
        for name in code.co_names:
            if name in value.__globals__:
                yield f"variable {name}", value.__globals__[name]
        for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            yield "a default", default
    elif inspect.ismethod(value):
        yield "", value.__self__
        yield "", value.__func__
    elif isinstance(value, functools.partial):
        yield "", value.func
        for argument in (*value.args, *value.keywords.values()):
            yield "an argument", argument
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"item {key!r}", item
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield "", item
    elif isinstance(value, type):
        for item in vars(value).values():
            yield "", item
    else:
        yield from _attributes(value)
        yield "", type(value)


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    is_own = type(value).__module__.startswith("headgate.")
    names = {field.name for field in fields(value)} if is_dataclass(value) else set()
    for name in sorted(names | set(getattr(value, "__dict__", ()))):
        yield "" if is_own else f"attribute {name}", getattr(value, name, None)


def _is_refused(value: object, send: Callable[[Any], object]) -> bool:
    try:
        send(value)
    except Exception:
        return True
    return False


_RECORD_CHARS_MAX = 1_000
_OWN_CODE = str(Path(__file__).resolve().parents[1])
_POLARS_CODE = str(Path(pl.__file__).parent)


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

    @property
    def reason(self) -> str:
        """What went wrong, in the user's words first, and where."""
        on = "on the record" if self.record.startswith("{") else "in" if self.record.endswith("()") else "on"
        return self._said(f"its function failed {on} {self.record}")

    def _said(self, where: str) -> str:
        said, operator = first_words(self.traceback_text), f"operator '{self.node}'"
        words = [said, where] if said else [where]
        return "; ".join(words if said.startswith(operator) else [f"{operator}: {words[0]}", *words[1:]])

    def __str__(self) -> str:
        return f"{self.reason}\n{self.traceback_text}"


class HookError(UserFunctionError):
    """A method that a checkpoint calls failed; ``record`` names it, with the checkpoint if there is one.

    Attributes:
        may_pass: it acts outside, where things may be in order later.
    """

    def __init__(self, node: str, record: str, traceback_text: str, may_pass: bool = True) -> None:
        super().__init__(node, record, traceback_text)
        self.args = (node, record, traceback_text, may_pass)
        self.may_pass = may_pass

    @property
    def reason(self) -> str:
        return self._said(f"its {self.record} failed")


def copied(node: str, function: Any) -> Any:
    """Return a copy of a user's function object: neither subtasks nor the driver share one.

    Raises:
        UsageError: it cannot be copied, hence not be sent to a worker either.
    """
    try:
        return copy.deepcopy(function)
    except Exception as error:
        raise unsendable_error(node, function, copy.deepcopy, error) from None


def own_method(function: object, name: str) -> Callable[[], None] | None:
    """Return the method ``name`` of the class of ``function``; None: it has none, or has a value of that name."""
    is_method = callable(getattr(type(function), name, None)) and name not in getattr(function, "__dict__", {})
    return getattr(function, name) if is_method else None


def has_life_cycle(function: object) -> bool:
    """Whether ``function`` is an object with ``open()`` or ``close()``, which each subtask calls once."""
    return any(own_method(function, name) is not None for name in ("open", "close"))


def is_of_one_subtask(function: object) -> bool:
    """Whether each subtask needs a copy of ``function``, which is opened and closed, or counts."""
    return has_life_cycle(function) or has_counters(function)


class FunctionOperator(Operator):
    """An operator that calls ``user_object``, a function of the user's; opens and closes it if it has such methods."""

    _is_function_open = False
    """Whether its ``open`` was called and did not raise."""

    def _open_function(self, function: Any) -> None:
        """Let ``user_object`` be ``function``, opened.

        Raises:
            UserFunctionError: its ``open`` raised.
        """
        self.user_object = function
        bind_counters(function, self.context.metrics)
        opens = own_method(function, "open")
        try:
            if opens is not None:
                opens()
        except Exception as error:
            raise UserFunctionError(self.context.node, "open()", user_traceback(error)) from None
        self._function_is_open()

    def _function_is_open(self) -> None:
        """``user_object`` is open: its counters count, also those that ``open`` has made."""
        bind_counters(self.user_object, self.context.metrics)
        self._is_function_open = True

    def close(self) -> None:
        """See ``Operator``. A function that did not open is not closed."""
        super().close()
        closes = own_method(self.user_object, "close") if self._is_function_open else None
        if closes is not None:
            closes()


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
    """Return a traceback of ``error`` that starts at the first frame outside Headgate.

    Where that is one of Polars, an expression failed, and its error says which: there is no code of the user to show.
    """
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_OWN_CODE):
        frame = frame.tb_next
    lines = traceback.format_exception_only(error)
    if frame is not None and not frame.tb_frame.f_code.co_filename.startswith(_POLARS_CODE):
        lines = ["Traceback (most recent call last):\n", *_formatted(frame), *lines]
    return "".join(lines).rstrip()


_OWN_ERROR = re.compile(r"headgate\.[\w.]+: ")


def first_words(traceback_text: str) -> str:
    """Return the first line of what the error in a ``user_traceback`` says, without the class of Headgate's own."""
    said = (line for line in traceback_text.splitlines() if line and not line.startswith((" ", "Traceback (")))
    first = next(said, "")
    own = _OWN_ERROR.match(first)
    return first if own is None else first[own.end() :]


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


RECORD_CHARS_MAX = 4_096
"""A shortened repr is kept of longer records, to bound memory."""

BAD_RECORD_SCHEMA = pa.schema(
    [
        pa.field("node", pa.large_string()),
        pa.field("problem", pa.large_string()),
        pa.field("position", pa.large_string()),
        pa.field("record", pa.large_string()),
    ]
)


def bad_records(node: str, problems: Sequence[str], positions: Sequence[str], records: Sequence[str]) -> pa.RecordBatch:
    """Return bad records as a batch of ``BAD_RECORD_SCHEMA``; the three sequences have equal length."""
    assert len(problems) == len(positions) == len(records)
    short = [r if len(r) <= RECORD_CHARS_MAX else r[:RECORD_CHARS_MAX] + "…" for r in records]
    texts = [[printable(text) for text in column] for column in ([node] * len(short), problems, positions)]
    return pa.record_batch([*texts, [encodable(text) for text in short]], schema=BAD_RECORD_SCHEMA)


def described_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the records as dicts for messages; columns with unreadable times as their integers."""
    columns = []
    for column in batch.columns:
        columns.append(column if unreadable_rows(column) is None else as_numbers(column))
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()  # type: ignore[no-any-return]


def divert_unreadable(operator: Operator, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Hand records over as bad ones that a Python function could not be given; return the others."""
    for name in batch.schema.names:
        unreadable = unreadable_rows(batch.column(name))
        if unreadable is None:
            continue
        rows = described_rows(batch.filter(pa.array(unreadable)))
        problem = f"its time '{name}' {why_unreadable(batch.schema.field(name).type)}"
        context = operator.context
        operator.output.divert(
            bad_records(
                context.node, [problem] * len(rows), [str(context.origin)] * len(rows), [shortened(r) for r in rows]
            )
        )
        batch = batch.filter(pa.array(np.logical_not(unreadable)))
    return batch
