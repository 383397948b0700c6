"""Functions of users: their errors, copies and counters, what of them cannot be sent to the workers; and bad records.

A bad record either fails the pipeline (the default) or goes to the dead-letter sink, within the same checkpoint as
the records around it, so that it is counted exactly once, too. Times of Arrow that Python's datetime cannot hold make
a record a bad one: they reach further than datetime, and some are finer.
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
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.errors import HeadgateError, UsageError
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import LATE_RECORDS, OF_EVERY_NODE, NodeProgress
from headgate.operators.base import Operator, OperatorMetrics
from headgate.plain_text import encodable, printable
from headgate.state.key_hash import column_words

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


_DAY_US = 86_400_000_000
_YEAR_1_DAY, _YEAR_10000_DAY = -719_162, 2_932_897
"""Days from 1970-01-01 to 0001-01-01 and to 10000-01-01."""

_TIMEDELTA_DAYS_MAX = 999_999_999
_DAY_MS = 86_400_000
_MICROSECOND_NS = 1_000


def unreadable_rows(column: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Return which rows have a time that Python's datetime cannot hold, or None where all can be held."""
    dtype = column.type
    if not _has_times(dtype):
        return None
    if dtype.num_fields:
        return _rows_around(column)
    unreadable = _unreadable(column)
    return unreadable if unreadable.any() else None


def why_unreadable(dtype: pa.DataType) -> str:
    """Return what a time of this type is when ``unreadable_rows`` names it."""
    if _is_fine(dtype):
        return "has a part of a microsecond, which Python's datetime cannot hold; cast it to microseconds before"
    if pa.types.is_duration(dtype):
        return "is longer than Python's timedelta can hold"
    if dtype.num_fields:
        return "has a time or duration that Python's datetime cannot hold"
    return "is outside the years 1 to 9999, which Python's datetime can hold"


def as_numbers(column: pa.Array) -> pa.Array:
    """Return the column with its times as the integers that stand for them."""
    return column.cast(_numbers(column.type))


def _unreadable(column: pa.Array) -> npt.NDArray[np.bool_]:
    words, dtype = column_words(as_numbers(column)), column.type
    if _is_fine(dtype):
        has_part: npt.NDArray[np.bool_] = words % _MICROSECOND_NS != 0
        return has_part
    if pa.types.is_duration(dtype):
        limit = _TIMEDELTA_DAYS_MAX * _DAY_MS
        return (words < -limit) | (words > limit) if dtype.unit == "ms" else np.zeros(len(words), np.bool_)
    day = _DAY_US if pa.types.is_timestamp(dtype) else 1
    return (words < _YEAR_1_DAY * day) | (words >= _YEAR_10000_DAY * day)


def _is_fine(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_time64(dtype) or pa.types.is_duration(dtype)) and dtype.unit == "ns"


def _rows_around(column: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Return in which rows of lists or structs something is unreadable."""
    if pa.types.is_struct(column.type):
        parts = [unreadable_rows(part) for part in column.flatten()]
        found = [part for part in parts if part is not None]
        return np.logical_or.reduce(found) if found else None
    inner = unreadable_rows(column.flatten())
    if inner is None:
        return None
    unreadable = np.zeros(len(column), np.bool_)
    lengths = pc.list_value_length(column).fill_null(0).to_numpy()
    unreadable[np.repeat(np.arange(len(column)), lengths)[inner]] = True
    return unreadable


def _has_times(dtype: pa.DataType) -> bool:
    if dtype.num_fields:
        return any(_has_times(dtype.field(at).type) for at in range(dtype.num_fields))
    return bool(pa.types.is_timestamp(dtype) or pa.types.is_date32(dtype) or pa.types.is_duration(dtype)) or _is_fine(
        dtype
    )


def _numbers(dtype: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(field.name, _numbers(field.type)) for field in dtype])
    if pa.types.is_large_list(dtype):
        return pa.large_list(_numbers(dtype.value_type))
    if pa.types.is_date32(dtype):
        return pa.int32()
    return pa.int64() if _has_times(dtype) else dtype


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
