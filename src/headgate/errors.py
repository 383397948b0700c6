"""Every exception that Headgate raises on purpose, and what a user can do about some of them.

::

HeadgateError ├── UsageError          the caller's pipeline, configuration or call is wrong; says what to change ├──
PipelineFailed      user code or an external system failed and the restart strategy gave up ├── BadRecord           a
record broke the ``fail`` policy; names the record and its position ├── ProtocolViolation   a peer or our own runtime
broke a rule; carries machine, phase and story ├── CorruptionError     bytes contradict themselves: path, offset,
expected, found │   └── UnknownFormat   another release or program wrote them: nothing says that they are damaged ├──
OutputDenied        a target denies output that a completed checkpoint promised: stop, do not retry ├── FencedError
a newer generation or epoch exists: stop, do not retry ├── TruncatedError      events that were to be read, or held,
are gone from their stream on purpose └── StorageError        an operation failed after its retries; ``is_transient``
says whether waiting may help

Outcomes that are expected (a declined checkpoint, a refused request) are data, not exceptions. Each constructor
passes exactly its own arguments on, so that every error survives pickling.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

from headgate.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class RestoreFiles:
    """Files of checkpoints are damaged: restore them from a copy."""


@dataclass(frozen=True, slots=True)
class PutCheckpointsBack:
    """A target remembers checkpoints that were in this place and were removed: put them back."""


@dataclass(frozen=True, slots=True)
class BringOutputBack:
    """A target denies output that was promised: bring back what is missing there."""


@dataclass(frozen=True, slots=True)
class NameAnotherPlace:
    """Nothing is at the place that the start names, or a target denies what it promised: name another one, or none."""


@dataclass(frozen=True, slots=True)
class GoBackPast:
    """The pipeline has newer checkpoints than the start names; ``checkpoint``, the newest, has to be named, too."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class LeaveBehind:
    """The pipeline lacks the operator or sink ``name``: bring it back, or allow its state to be dropped."""

    name: str


@dataclass(frozen=True, slots=True)
class NameOperator:
    """The operator ``name`` is new and has state: give it a name of its own."""

    name: str


Remedy: TypeAlias = (
    RestoreFiles | PutCheckpointsBack | BringOutputBack | NameAnotherPlace | GoBackPast | LeaveBehind | NameOperator
)


class HeadgateError(Exception):
    """Base class of every error that Headgate raises on purpose.

    Attributes:
        is_output_gone: whether a target reports that promised output no longer exists, or that other output is in its
            place.
        remedy: what the user can do, as a value for programs; the message says the same in words. None if there is no
            such value.
    """

    is_output_gone: bool = False
    remedy: Remedy | None = None

    _render_traceback_: property
    """Of IPython: a short traceback in notebooks (``user_line``)."""


_E = TypeVar("_E", bound=HeadgateError)


def gone(error: _E) -> _E:
    """Return ``error``, which says from now on that promised output is gone: nothing is lost by giving it up."""
    error.is_output_gone = True
    return error


def with_remedy(error: _E, remedy: Remedy | None) -> _E:
    """Return ``error``, which says from now on to programs, too, what the user can do."""
    error.remedy = remedy
    return error


class UsageError(HeadgateError):
    """The pipeline, configuration or call is wrong; the message says what to change."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class PipelineFailed(HeadgateError):
    """The pipeline failed and its restart strategy gave up.

    Attributes:
        reason: why it failed, in one sentence.
        detail: a short Python traceback of the user's own frames, or "".
        is_for_good: whether another start would fail in the same way until you change something.
    """

    def __init__(self, reason: str, detail: str = "", is_for_good: bool = False) -> None:
        super().__init__(reason, detail, is_for_good)
        self.reason = reason
        self.detail = detail
        self.is_for_good = is_for_good

    def __str__(self) -> str:
        return f"{self.reason}\n{self.detail}" if self.detail else self.reason


class BadRecord(HeadgateError):
    """A record broke a rule, and the pipeline's policy for bad records is to fail.

    Attributes:
        node: the name of the operator that refused the record.
        problem: what is wrong with the record, in one clause.
        position: where the record came from (for example ``app.log line 17 (byte 1234)``), or "".
        record: the shortened repr of the record.
    """

    def __init__(self, node: str, problem: str, position: str, record: str) -> None:
        super().__init__(node, problem, position, record)
        self.node = node
        self.problem = problem
        self.position = position
        self.record = record

    def __str__(self) -> str:
        where = f" at {self.position}" if self.position else ""
        return (
            f"operator '{self.node}' refused a record{where}: {self.problem}; the record is {self.record}. "
            "Correct the input, or divert such records with Pipeline(bad_records=DeadLetter(sink))."
        )


class ProtocolViolation(HeadgateError):
    """A peer or Headgate itself broke a rule of a protocol. The state machine that noticed it cannot continue.

    Attributes:
        machine: the name of the state machine's class.
        problem: the rule that was broken.
        story: the last events of the state machine, oldest first, as text.
    """

    def __init__(self, machine: str, problem: str, story: tuple[str, ...] = ()) -> None:
        super().__init__(machine, problem, story)
        self.machine = machine
        self.problem = problem
        self.story = story

    def __str__(self) -> str:
        tail = "".join(f"\n    {line}" for line in self.story[-12:])
        return f"{self.machine}: {self.problem}" + (f"; its last events:{tail}" if tail else "")


class CorruptionError(HeadgateError):
    """A file or object is damaged: its bytes contradict themselves.

    Attributes:
        path: the file or object.
        offset: the byte offset of the contradiction (0 if it concerns the whole file).
        expected, found: what should be there, and what is there.
    """

    def __init__(self, path: str, offset: int, expected: str, found: str) -> None:
        super().__init__(path, offset, expected, found)
        self.path = path
        self.offset = offset
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        return f"{self.path} is damaged at byte {self.offset}: expected {self.expected}, found {self.found}"


class UnknownFormat(CorruptionError):
    """A file is of a format that this release does not read; nothing says that it is damaged."""

    def __str__(self) -> str:
        return (
            f"{self.path} is not in a format that this release of Headgate reads: expected {self.expected}, found "
            f"{self.found}; use the release that wrote it, if one did, or restore the file from a copy"
        )


GO_ON_WITHOUT_IT = "go on without it (Pipeline(..., on_denied_output='lose') in the program)"
"""What to do about output that is gone for good."""


class OutputDenied(HeadgateError):
    """A target says *aborted* or *unknown* about output that a completed checkpoint promised, or refuses it for good.

    Attributes:
        sink: name of the sink.
        checkpoint: the checkpoint of the output, or 0 while nothing is promised yet.
        cause: what the target said.
        is_refused: it cannot be used as it is, such as for lack of rights; no output was said to be missing.
    """

    remedy: Remedy | None = BringOutputBack()

    def __init__(self, sink: str, checkpoint: int, cause: str, *, is_refused: bool = False) -> None:
        super().__init__(sink, checkpoint, cause)
        self.sink = sink
        self.checkpoint = checkpoint
        self.cause = cause
        self.is_refused = is_refused
        if is_refused:
            self.remedy = None

    def __str__(self) -> str:
        what = f"commit the output of checkpoint {self.checkpoint}" if self.checkpoint else "be recovered"
        if self.is_refused:
            return f"sink '{self.sink}' cannot {what}: {self.cause}; starting again cannot help before that is mended"
        back = ""
        if self.checkpoint:
            named = f"--restore PLACE --go-back-past {self.checkpoint}"
            back = f", restore another checkpoint (headgate run PROGRAM {named})"
        lose = f", {GO_ON_WITHOUT_IT}" if self.is_output_gone else ""
        return (
            f"sink '{self.sink}' cannot {what}: {self.cause}; starting again cannot help: bring back what is missing "
            f"there{lose}{back}, or start over, which deletes all output: headgate run PROGRAM --fresh"
        )


class FencedError(HeadgateError):
    """A newer generation or epoch owns what this caller tried to change: stop, do not retry.

    Attributes:
        what: what the newer generation owns; if the error has no generations, the whole message.
        mine, newest: the caller's generation and the newest one; 0 if the error has none.
    """

    def __init__(self, what: str, mine: int = 0, newest: int = 0) -> None:
        super().__init__(what, mine, newest)
        self.what = what
        self.mine = mine
        self.newest = newest

    def __str__(self) -> str:
        if not self.newest:
            return self.what
        return f"{self.what}: generation {self.mine} was replaced by generation {self.newest}"


class TruncatedError(HeadgateError):
    """Events that a reader or a hold needs were truncated: the stream now begins after them.

    Attributes:
        stream, segment: the stream and the segment of these events.
        position: the position of the first event that was wanted.
        head: the position of the first event that still exists.
    """

    def __init__(self, stream: str, segment: int, position: int, head: int) -> None:
        super().__init__(stream, segment, position, head)
        self.stream = stream
        self.segment = segment
        self.position = position
        self.head = head

    def __str__(self) -> str:
        return (
            f"segment {self.segment} of stream '{self.stream}' begins at position {self.head} now, and events from "
            f"position {self.position} were wanted: {self.head - self.position:,} events were truncated and are gone"
        )


class StorageError(HeadgateError):
    """An operation on storage failed after its retries. A failed write may still have taken effect.

    Attributes:
        operation: the operation, for example ``put``.
        path: the file or object that it concerned.
        cause: the underlying problem.
        is_transient: True if waiting may help (no space, time-out, connection lost).
    """

    def __init__(self, operation: str, path: str, cause: str, is_transient: bool = True) -> None:
        super().__init__(operation, path, cause, is_transient)
        self.operation = operation
        self.path = path
        self.cause = cause
        self.is_transient = is_transient

    def __str__(self) -> str:
        return f"cannot {self.operation} {self.path}: {self.cause}"
