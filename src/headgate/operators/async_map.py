"""``map_async``: ask an external service for each record, with many requests at a time (docs/spec/operators.md).

Modelled on Flink's ``AsyncDataStream``. Coroutines run in an event loop in a thread of its own; everything else, time
included, is the mailbox's. Records without an answer are the state: after a restore they are asked for again.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from heapq import heappop, heappush
from itertools import chain, groupby, takewhile
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.dataclass import dataclass
from headgate.errors import StorageError, UsageError
from headgate.model.state_schema import Form
from headgate.operators.base import Operator, OperatorContext, Output, RestoredState
from headgate.operators.functions import Refused, Row, RowWriter, divert_refused, failure, paused_gc, rows_of
from headgate.operators.keys import partition
from headgate.operators.schemas import SchemaLike, as_schema, schema_text
from headgate.operators.user_functions import (
    UserFunctionError,
    batch_error,
    copied,
    divert_unreadable,
    user_error,
    user_traceback,
)
from headgate.state.snapshot import FrozenState, decode_stream, encode_batches

Result: TypeAlias = Row | Iterable[Row] | None
"""What an asynchronous function returns: one record, several, or none."""

_SECTION = "requests"
_CLOSE_S = 5.0

BATCHES_MIN = 4
"""So many batches at least the limit of records is divided into, so that several are asked for at a time."""


class AsyncFunction:
    """Base class of functions for ``map_async`` that need a client of a service. Pass an instance.

    Every subtask works on a copy of the instance. All methods run in one event loop, which belongs to the subtask.
    """

    async def open(self) -> None:
        """Make the client. Called once per subtask, before any call. Default: does nothing."""

    async def call(self, row: Row) -> Result:
        """Return what becomes of one record, which is a new dict: a dict, a list of dicts, or None for nothing.

        Calls run side by side, so do not change attributes while another call may use them. After a failure a record
        may be asked for again, also if the service has answered before.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Close the client. Called when the subtask ends, also after a failure, but not when its process is killed.

        Default: does nothing.
        """


class AsyncBatchFunction(AsyncFunction):
    """One that is called with many records at a time."""

    async def call_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return what becomes of the records, in the schema of the results."""
        raise NotImplementedError


@dataclass(frozen=True)
class AsyncMapSpec:
    """Ask for each record.

    Attributes:
        function: an ``AsyncFunction``, or an ``async def`` function of a row.
        input_schema: of the records, canonical.
        schema: of the results; None: that of the records.
        keys: by which the records are distributed; () if they have no key.
        limit: so many records at most are asked for and not answered, per subtask.
        timeout_ms: of one attempt.
        retries: how often a request is repeated that failed or timed out.
        retry_delay_ms: before the first repetition; it doubles each time.
        retry_if: which errors are worth a repetition; None: all.
        on_timeout: makes the result of a record from it when its last attempt has timed out; None: that is an error.
        is_ordered: results leave in the order of the records.
        diverts_exceptions: a record that failed is a bad record.
    """

    function: AsyncFunction | Callable[[Row], Coroutine[Any, Any, Result]]
    input_schema: pa.Schema
    schema: SchemaLike | None = None
    keys: tuple[str, ...] = ()
    limit: int = 100
    timeout_ms: int = 5_000
    retries: int = 0
    retry_delay_ms: int = 100
    retry_if: Callable[[Exception], bool] | None = None
    on_timeout: Callable[[Row], Result] | None = None
    is_ordered: bool = True
    diverts_exceptions: bool = False
    is_alone: bool = field(default=True, init=False)
    """See ``model.plan``."""

    def build(self) -> Operator:
        return AsyncMapOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema of the results.

        Raises:
            UsageError: it has an unknown type.
        """
        return schema if self.schema is None else as_schema(node, self.schema)

    def state_text(self) -> str:
        """See ``specs.state_text``. Columns are compared where there are records."""
        return Form.REQUESTS.value


def check_async_function(node: str, function: object) -> None:
    """Refuse what cannot be awaited.

    Raises:
        UsageError
    """
    if isinstance(function, AsyncBatchFunction):
        return
    if isinstance(function, AsyncFunction):
        if type(function).call is AsyncFunction.call:
            raise UsageError(f"operator '{node}': {type(function).__name__} has no method 'async def call(self, row)'")
        for name in ("open", "call", "close"):
            if not inspect.iscoroutinefunction(getattr(function, name)):
                raise UsageError(f"operator '{node}': {type(function).__name__}.{name} must be an 'async def'")
        return
    if isinstance(function, type):
        raise UsageError(f"operator '{node}': give an instance, such as {function.__name__}(), not the class")
    called = function if inspect.isroutine(function) else getattr(function, "__call__", None)  # noqa: B004
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called):
        for name in ("open", "close"):
            if callable(getattr(type(function), name, None)):
                raise UsageError(
                    f"operator '{node}': {type(function).__name__}.{name} would never be called; derive the class from "
                    "headgate.AsyncFunction, and call the method for each record 'call'"
                )
        return
    if inspect.isasyncgenfunction(function) or inspect.isasyncgenfunction(called):
        raise UsageError(f"operator '{node}': an async function must return a list of dicts instead of yielding them")
    raise UsageError(
        f"operator '{node}': map_async needs an 'async def' function of a row or a headgate.AsyncFunction, not "
        f"{function!r}; for an ordinary function use map"
    )


@dataclass(eq=False, slots=True)
class _Request:
    """A record on its way, or several that are asked for together.

    Attributes:
        batch, first, count: where the records are.
        row: the record, as a dict that nothing has changed; None: to be made from ``batch``.
        attempt: number of the attempt that is waited for; 0: none was made yet.
        cancel: ends that attempt; None: none runs.
        results: the answer; None: there is none yet.
        refused: what it is as a bad record, if it failed.
    """

    batch: pa.RecordBatch
    first: int
    row: Row | None = None
    count: int = 1
    attempt: int = 0
    cancel: Callable[[], None] | None = None
    results: list[Any] | pa.RecordBatch | None = None
    refused: Refused | None = None

    @property
    def records(self) -> pa.RecordBatch:
        return self.batch.slice(self.first, self.count)


@dataclass(eq=False, slots=True)
class _Segment:
    """Requests of records between two watermarks, in order, and what follows them: watermarks and idleness."""

    requests: OrderedDict[int, _Request] = field(default_factory=OrderedDict)
    signals: list[tuple[Callable[[Any], None], Any]] = field(default_factory=list)


class AsyncMapOperator(Operator):
    """Sends requests up to the limit, and emits answers; never waits for one."""

    def __init__(self, spec: AsyncMapSpec) -> None:
        self._spec = spec
        self._segments: deque[_Segment] = deque([_Segment()])
        self._unsent: deque[tuple[int, _Request]] = deque()
        self._sent: dict[int, _Request] = {}
        self._open_count = 0
        """Records that were asked for at least once and have not left: the limit is about these."""
        self._answers: deque[tuple[int, int, Any, BaseException | None]] = deque()
        self._deadlines: deque[tuple[int, int, int]] = deque()
        self._repeats: list[tuple[int, int, int]] = []
        self._ready_count = 0
        """Answers since records were emitted last."""
        self._release_ms = 0
        self._next_number = 0
        self._is_opened = False

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._schema = self._spec.output_schema(self._spec.input_schema, context.node)
        self._writer = RowWriter(self._schema)
        function = copied(context.node, self._spec.function)
        self.user_object = function
        self._is_batched = isinstance(function, AsyncBatchFunction)
        name = "call_batch" if self._is_batched else "call"
        self._function: Callable[[Any], Coroutine[Any, Any, Any]] = getattr(function, name, function)
        self._loop = context.threads.event_loop(f"headgate-async-{context.node}")
        if isinstance(function, AsyncFunction):
            error = self._awaited(function.open, None)
            if isinstance(error, StorageError):  # says itself whether waiting may help
                raise error
            if error is not None:
                raise UserFunctionError(context.node, "open()", user_traceback(error))
            self._is_opened = True

    def _awaited(self, call: Callable[[], Coroutine[Any, Any, Any]], timeout_s: float | None) -> BaseException | None:
        """Wait until ``call`` has returned; return its error. Only where no records are processed."""
        ended = self.context.threads.event()
        errors: list[BaseException | None] = []

        def done(_: Any, error: BaseException | None) -> None:
            errors.append(error)
            ended.set()

        self._loop.submit(call, done)
        ended.wait(timeout_s)
        return errors[0] if errors else None

    # -- input --------------------------------------------------------------------------------------------------

    def process(self, batch: pa.RecordBatch) -> None:
        batch = divert_unreadable(self, batch)
        self._take(batch)
        self._send_some()

    def _take(self, batch: pa.RecordBatch) -> None:
        if self._segments[-1].signals:
            self._segments.append(_Segment())
        requests = self._segments[-1].requests
        if self._is_batched:
            size, rows = max(1, self._spec.limit // BATCHES_MIN), batch.num_rows
            found = [_Request(batch, first, count=min(size, rows - first)) for first in range(0, rows, size)]
            for number, request in self._numbered(found):
                requests[number] = request
                self._unsent.append((number, request))
            return
        with paused_gc():
            for index, row in enumerate(rows_of(batch)):
                request = requests[self._next_number] = _Request(batch, index, row)
                self._unsent.append((self._next_number, request))
                self._next_number += 1

    def _numbered(self, requests: Sequence[_Request]) -> list[tuple[int, _Request]]:
        first, self._next_number = self._next_number, self._next_number + len(requests)
        return list(enumerate(requests, first))

    def on_watermark(self, watermark_ms: int) -> None:
        self._signal(self.output.emit_watermark, watermark_ms)

    def on_idle(self, is_idle: bool) -> None:
        self._signal(self.output.emit_idle, is_idle)

    def _signal(self, emit: Callable[[Any], None], value: Any) -> None:
        """Emit event time when everything in front of it has left."""
        if self.is_waiting:
            self._segments[-1].signals.append((emit, value))
        else:
            emit(value)

    @property
    def is_full(self) -> bool:
        return bool(self._unsent)

    @property
    def is_waiting(self) -> bool:
        return len(self._segments) > 1 or bool(self._segments[0].requests)

    # -- requests -----------------------------------------------------------------------------------------------

    def next_tick_ms(self) -> int | None:
        if self._answers or (self._unsent and self._may_send):
            return 0
        while self._deadlines and not self._is_current(*self._deadlines[0][1:]):
            self._deadlines.popleft()
        due = [times[0][0] for times in (self._deadlines, self._repeats) if times]
        due += [self._release_ms] if self._ready_count else []
        return min(due, default=None)

    @property
    def _may_send(self) -> bool:
        return self._open_count < self._spec.limit and not self.context.is_stopping

    def on_tick(self, now_ms: int) -> None:
        while self._answers:
            self._on_answer(*self._answers.popleft())
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, number, attempt = self._deadlines.popleft()
            if self._is_current(number, attempt):
                self._on_timeout(number)
        while self._repeats and self._repeats[0][0] <= now_ms:
            _, number, _ = heappop(self._repeats)
            self._send(number, self._sent[number])
        if self._ready_count and (now_ms >= self._release_ms or 2 * self._ready_count >= self._spec.limit):
            self._release()
        self._send_some()

    def _is_current(self, number: int, attempt: int) -> bool:
        """Whether the answer of this attempt is waited for."""
        request = self._sent.get(number)
        return request is not None and request.attempt == attempt and request.cancel is not None

    def _send_some(self) -> None:
        while self._unsent and self._may_send:
            number, request = self._unsent.popleft()
            self._sent[number] = request
            self._open_count += request.count
            self._send(number, request)

    def _send(self, number: int, request: _Request) -> None:
        asked = request.records if self._is_batched else self._row(request)
        request.attempt += 1
        attempt = request.attempt

        def done(value: Any, error: BaseException | None) -> None:  # in the thread of the loop
            self._answers.append((number, attempt, value, error))
            self.context.wake()

        self._deadlines.append((self.context.clock_ms() + self._spec.timeout_ms, number, attempt))
        call = self._function if self._is_batched else self._call
        request.cancel = self._loop.submit(partial(call, asked), done)

    async def _call(self, row: Row) -> Any:
        return self._taken(await self._function(row))

    def _taken(self, value: Any) -> Any:
        """Return rows as they are now: the function may change its own for the next record."""
        taken = self._writer.taken
        return [taken(row) for row in value] if isinstance(value, list | tuple) else taken(value)

    def _row(self, request: _Request) -> Row:
        """Return the record as a dict of its own."""
        row, request.row = request.row, None
        return row if row is not None else rows_of(request.batch.slice(request.first, 1))[0]

    def _on_answer(self, number: int, attempt: int, value: Any, error: BaseException | None) -> None:
        if not self._is_current(number, attempt):
            return  # it comes after its timeout
        request = self._sent[number]
        request.cancel = None
        if error is not None:
            self._on_error(number, request, error)
        else:
            self._answer(number, request, value)

    def _answer(self, number: int, request: _Request, value: Any) -> None:
        try:
            request.results = value if self._is_batched else results_of(value)
        except Exception as error:
            self._fail(number, request, error)
        else:
            self._leave(number)

    def _leave(self, number: int) -> None:
        """The record needs no more answer. While the worker is busy, results wait to be emitted together."""
        del self._sent[number]
        if self._ready_count == 0:
            self._release_ms = self.context.clock_ms() + (self.context.flush_ms if self.context.is_busy else 0)
        self._ready_count += 1

    def _on_timeout(self, number: int) -> None:
        request = self._sent[number]
        assert request.cancel is not None, "only an attempt that runs can time out"
        request.cancel()
        request.cancel = None
        self.context.metrics.add("timed_out", 1)
        error = TimeoutError(f"no answer within {self._spec.timeout_ms} ms, in attempt {request.attempt}")
        self._on_error(number, request, error, is_timeout=True)

    def _on_error(self, number: int, request: _Request, error: BaseException, *, is_timeout: bool = False) -> None:
        spec = self._spec
        try:
            is_worth = isinstance(error, Exception) and (spec.retry_if is None or bool(spec.retry_if(error)))
            if is_worth and request.attempt <= spec.retries:
                self.context.metrics.add("retried", 1)
                due_ms = self.context.clock_ms() + (spec.retry_delay_ms << min(request.attempt - 1, 20))
                heappush(self._repeats, (due_ms, number, request.attempt))
            elif is_timeout and spec.on_timeout is not None:
                self._answer(number, request, self._taken(spec.on_timeout(self._row(request))))
            else:
                self._fail(number, request, error)
        except UserFunctionError:
            raise
        except Exception as other:  # of retry_if or on_timeout
            self._fail(number, request, other)

    def _fail(self, number: int, request: _Request, error: BaseException) -> None:
        if request.count > 1:
            if not self._spec.diverts_exceptions or not isinstance(error, Exception):
                raise batch_error(self.context.node, request.count, error) from None
            self._split(number, request)
            return
        row = self._row(request)
        if not self._spec.diverts_exceptions or not isinstance(error, Exception):
            raise user_error(self.context.node, row, error) from None
        request.results, request.refused = [], failure(row, error)
        self._leave(number)

    def _split(self, number: int, failed: _Request) -> None:
        """Ask for the records of a failed request one by one, to find those that fail."""
        rows = range(failed.first, failed.first + failed.count)
        singles = self._numbered([_Request(failed.batch, first) for first in rows])
        segment = next(segment for segment in self._segments if number in segment.requests)
        pairs = (singles if one is failed else [(key, one)] for key, one in segment.requests.items())
        segment.requests = OrderedDict(chain.from_iterable(pairs))
        del self._sent[number]
        self._open_count -= failed.count
        self._unsent.extendleft(reversed(singles))

    # -- output -------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Emit the answers that may leave, and event time after what it stands after."""
        self._ready_count = 0
        while True:
            segment = self._segments[0]
            leaving = self._leaving(segment)
            self._open_count -= sum(request.count for request in leaving)
            batch, refused = self._results(leaving)
            divert_refused(self, [r.refused for r in leaving if r.refused is not None] + refused)
            self.output.emit(batch)
            if segment.requests:
                return
            for emit, value in segment.signals:
                emit(value)
            segment.signals.clear()
            if len(self._segments) == 1:
                return
            self._segments.popleft()

    def _results(self, leaving: Sequence[_Request]) -> tuple[pa.RecordBatch, list[Refused]]:
        """Return the answers as a batch, and those that do not fit."""
        if not self._is_batched:
            return self._writer.batch([row for request in leaving for row in request.results or ()])
        batches = [request.results for request in leaving if isinstance(request.results, pa.RecordBatch)]
        return (pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], self._schema)), []

    def _leaving(self, segment: _Segment) -> list[_Request]:
        """Take the answered requests that may leave out of ``segment``."""
        requests = segment.requests
        if not self._spec.is_ordered:
            sent = takewhile(lambda item: item[1].attempt, requests.items())
            numbers = [number for number, request in sent if request.results is not None]
            return [requests.pop(number) for number in numbers]
        found: list[_Request] = []
        while requests:
            number = next(iter(requests))
            if requests[number].results is None:
                break
            found.append(requests.pop(number))
        return found

    # -- state --------------------------------------------------------------------------------------------------

    def before_barrier(self) -> None:
        while self._answers:
            self._on_answer(*self._answers.popleft())
        self._release()

    def freeze(self) -> FrozenState | None:
        """Return the records that have not left: no answer is in the state."""
        found = [(r.batch, r.first, r.count) for segment in self._segments for r in segment.requests.values()]
        return FrozenRequests(self._spec.input_schema, found)

    def restore(self, states: Sequence[RestoredState]) -> None:
        """Take over the records that this subtask is to ask for, in their order; they are sent when input may flow.

        Raises:
            UsageError: they have other columns than the input has now.
        """
        for state in sorted(states, key=lambda state: state.subtask_index):
            path = f"state of '{self.context.node}', subtask {state.subtask_index}"
            for data in decode_sections(state.payload, path).values():
                schema, batches = decode_stream(data, path)
                for batch in batches:
                    self._check_columns(schema)
                    own = self._own(batch, state)
                    if own is not None and own.num_rows:
                        self._take(own)

    def _own(self, batch: pa.RecordBatch, state: RestoredState) -> pa.RecordBatch | None:
        """Return the rows for this subtask: by key, or as they were, or dealt out."""
        context = self.context
        if self._spec.keys:
            return partition(batch, self._spec.keys, context.max_parallelism, context.parallelism)[
                context.subtask_index
            ]
        if state.parallelism == context.parallelism:
            return batch if state.subtask_index == context.subtask_index else None
        numbers = np.arange(batch.num_rows) + state.subtask_index
        return batch.filter(pa.array(numbers % context.parallelism == context.subtask_index))

    def _check_columns(self, schema: pa.Schema) -> None:
        if not schema.equals(self._spec.input_schema):
            raise UsageError(
                f"the restored checkpoint holds records of operator '{self.context.node}' without an answer, with the "
                f"columns {schema_text(schema)}, but its input has {schema_text(self._spec.input_schema)} now; run the "
                "former program until it has no open requests, such as to the end of its input, or give the operator "
                "another name"
            )

    def finish(self) -> None:
        assert not self.is_waiting, "input ends when every request was answered"

    def close(self) -> None:
        """End the requests, then close the client."""
        if not hasattr(self, "_loop"):
            return
        for request in self._sent.values():
            if request.cancel is not None:
                request.cancel()
        if self._is_opened:
            self._awaited(self.user_object.close, _CLOSE_S)  # type: ignore[attr-defined]
        self._loop.close()


def results_of(value: Any) -> list[Any]:
    """Return the rows that an asynchronous function returned.

    Raises:
        TypeError: it is no dict, iterable of dicts or None.
    """
    if value is None:
        return []
    if isinstance(value, dict):
        return [value]
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"an async function must return a dict, a list of dicts or None, not {type(value).__name__}")
    return list(value)


class FrozenRequests(FrozenState):
    """Records without an answer at a barrier, in their order."""

    def __init__(self, schema: pa.Schema, found: list[tuple[pa.RecordBatch, int, int]]) -> None:
        super().__init__()
        self._schema = schema
        self._found = found

    def _rows(self) -> Mapping[str, int]:
        return {_SECTION: sum(count for _, _, count in self._found)}

    def _encode(self) -> Sequence[Buffer]:
        batches = []
        for _, some in groupby(self._found, lambda one: id(one[0])):
            parts = list(some)
            rows = np.concatenate([np.arange(first, first + count) for _, first, count in parts])
            batches.append(parts[0][0].take(pa.array(rows)))
        return encode_sections({_SECTION: encode_batches(self._schema, batches)})

    def _forget(self) -> None:
        self._found = []
