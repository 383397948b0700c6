"""Request handlers: verbs of catalogue and storage, long polls, and what the server counts.

Counterparts: ``connections`` brings the requests; ``client.connection`` and ``client.remote_store`` send them. Source:
SS9 and SS18 of docs/spec/served-store.md. Never calls anything that is no verb. Outcomes, changes
and findings of checks may be lost with the process: then an outcome is unknown, and a check begins again.
"""

from __future__ import annotations

import http
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from headgate.codec.decodable import decodable
from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_ENVIRONMENT, SYSTEM_THREADS, Clock, Environment, Event, Threads
from headgate.errors import HeadgateError, ProtocolViolation, StorageError
from headgate.model.pipeline_identity import Mine, Owner
from headgate.storage.base import Storage
from headgate.store.catalogue.base import VERBS, Catalogue
from headgate.store.client.connection import SETTLE, RequestOutcome
from headgate.store.client.messages import (
    CATALOGUE_SIGNATURES,
    OF_THE_CATALOGUE,
    OF_THE_STORAGE,
    STORAGE_SIGNATURES,
    Judged,
    Signature,
    UnjudgedError,
    decode,
    encode,
    encode_failure,
)
from headgate.store.client.remote_store import CHECK, DATE, NEWS, UNTOUCHED, CheckRequest, CheckResult, SeenChanges
from headgate.store.fsck import Problem, check_store
from headgate.store.server.connections import ChunkStorage, IncompleteError, Range

_T = TypeVar("_T")

ANSWERS_MAX = 1_024
ANSWER_BYTES_MAX = 1 << 16
"""So many answers are kept, and none that is larger: then its caller hears that the outcome is unknown."""

CARRIED_OUT_MAX = 1 << 18
"""So many names of questions are kept for longer than their answers: one whose answer is not kept any more must not
pass for one that never came, which its client asks again. More than a server carries out while a client waits."""

VOID_MAX = 1 << 16
"""Questions that were asked for and had not come; a connection that was cut delivers nothing for longer."""


class VoidError(Exception):
    """The question came when its client had given it up, or came twice. Expected: not a HeadgateError."""


class Outcome:
    """Where the answer to one question is put."""

    def __init__(self) -> None:
        self.status = 0
        self.data = b""


class Deduplication:
    """The questions of one process of the server."""

    def __init__(self, threads: Threads = SYSTEM_THREADS) -> None:
        self._changed = threads.condition()
        self._under_way: set[str] = set()
        self._answered: OrderedDict[str, Outcome] = OrderedDict()
        self._carried_out: OrderedDict[str, None] = OrderedDict()
        self._void: OrderedDict[str, None] = OrderedDict()

    @contextmanager
    def under_way(self, name: str) -> Iterator[Outcome]:
        """Carry out the question ``name`` within the block, which says what was answered.

        Raises:
            VoidError: it is not to be carried out.
        """
        outcome = Outcome()
        with self._changed:
            if name in self._void or name in self._under_way or name in self._carried_out:
                raise VoidError
            self._under_way.add(name)
        try:
            yield outcome
        finally:
            with self._changed:
                # also when the work raised: it may have taken effect, so the question must not pass for a new one
                self._under_way.discard(name)
                if len(outcome.data) > ANSWER_BYTES_MAX:
                    outcome.status, outcome.data = 0, b""
                _keep(self._answered, name, outcome, ANSWERS_MAX)
                _keep(self._carried_out, name, None, CARRIED_OUT_MAX)
                self._changed.notify_all()

    def settle(self, name: str, wait_s: float) -> RequestOutcome:
        """Return what became of a question; one that has not come is never carried out from now on."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._under_way, wait_s)
            if name in self._under_way:
                return RequestOutcome(is_over=False)
            outcome = self._answered.get(name)
            if outcome is not None:
                return RequestOutcome(is_over=True, status=outcome.status, data=outcome.data)
            # its answer is not kept any more: over, with an unknown outcome, which its caller has to look up
            if name in self._carried_out:
                return RequestOutcome(is_over=True)
            _keep(self._void, name, None, VOID_MAX)
            return RequestOutcome(is_over=True, is_void=True)


def _keep(among: OrderedDict[str, _T], name: str, value: _T, most: int) -> None:
    among[name] = value
    while len(among) > most:
        among.popitem(last=False)


LOOK_S = 0.01
"""Between two looks while a client waits. One costs microseconds."""


class ChangeFeed:
    """The number of the store's changes, and those who wait for another one."""

    def __init__(self, look: Callable[[], int], threads: Threads = SYSTEM_THREADS) -> None:
        """``look`` returns a number that is another one after every change."""
        self._look = look
        self._changed = threads.condition()
        self._seen: int | None = None
        self._number = 0
        self._waiting_count = 0
        self._is_closed = False
        self._thread = threads.thread(self._watch, "headgate-store-news")
        self._thread.start()

    def wait(self, number: int, wait_s: float) -> int:
        """Return a number that is not ``number`` when there is news, at the latest after ``wait_s`` seconds."""
        with self._changed:
            self._waiting_count += 1
            self._changed.notify_all()
            try:
                self._look_again()  # there are no looks while no client waits
                self._changed.wait_for(lambda: self._is_closed or self._number != number, wait_s)
                return self._number
            finally:
                self._waiting_count -= 1

    def changed(self) -> None:
        """Something was changed, or may have been."""
        with self._changed:
            self._number += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all that wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _watch(self) -> None:
        with self._changed:
            while not self._is_closed:
                self._changed.wait_for(lambda: self._is_closed or self._waiting_count)
                self._look_again()
                self._changed.wait_for(lambda: self._is_closed, LOOK_S)

    def _look_again(self) -> None:
        try:
            seen = self._look()
        except HeadgateError:
            return  # the next verb says what is wrong
        if seen != self._seen:
            self._seen = seen
            self._number += 1
            self._changed.notify_all()


KEPT_MAX = 16
"""Checks that keep their findings."""


class _Check:
    """One check."""

    def __init__(self, number: int, is_over: Event) -> None:
        self.number = number
        self.is_over = is_over
        self.found: Sequence[Problem] = ()
        self.error: HeadgateError | None = None


class CheckJobs:
    """The checks of one process of the server."""

    def __init__(
        self, check: Callable[[bool], Sequence[Problem]], first: int = 1, threads: Threads = SYSTEM_THREADS
    ) -> None:
        """Begin.

        Args:
            check: returns the problems; its argument: whether every event is read, too.
            first: number of the first check; far from those of other processes of the server: their clients may ask on.
            threads: what checks run in.
        """
        self._check = check
        self._threads = threads
        self._lock = threads.lock()
        self._alone = threads.lock()
        self._checks: dict[int, _Check] = {}
        self._numbers = itertools.count(first)

    def ask(self, number: int, wait_s: float, *, verify_events: bool) -> CheckResult:
        """Return what the check ``number`` found, or that it goes on; one that is not known is begun.

        Raises:
            HeadgateError: what ended it.
        """
        with self._lock:
            check = self._checks.get(number) or self._begin(verify_events)
        if not check.is_over.wait(wait_s):
            return CheckResult(check.number, is_over=False)
        if check.error is not None:
            raise check.error
        return CheckResult(check.number, is_over=True, problems=tuple(check.found))

    def _begin(self, verify_events: bool) -> _Check:
        check = _Check(next(self._numbers), self._threads.event())
        self._checks[check.number] = check
        for number in [x for x, old in self._checks.items() if old.is_over.is_set()][:-KEPT_MAX]:
            del self._checks[number]
        self._threads.thread(self._run, "headgate-store-check", check, verify_events).start()
        return check

    def _run(self, check: _Check, verify_events: bool) -> None:
        try:
            with self._alone:
                check.found = self._check(verify_events)
        except HeadgateError as error:
            check.error = error
        except BaseException as error:  # a mistake of ours: it must not pass for a sound store (SS18)
            problem = f"the server made a mistake: {error!r}"
            check.error = StorageError("check", "the store", problem, is_transient=False)
            raise
        finally:
            check.is_over.set()


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """Since the server began.

    Attributes:
        requests: questions answered; those for news do not count.
        errors: of them, answered by an error that the store's rules give, such as a stream that is not there.
        failures: of them, that the server could not answer: a mistake of ours.
        refused: greetings of those who do not know the token, or are of another version, and what was no question.
        bytes_in, bytes_out: of chunks.
        connections: open now.
    """

    requests: int = 0
    errors: int = 0
    failures: int = 0
    refused: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    connections: int = 0


class ServerMetrics:
    """The counts of a server; threads share it."""

    def __init__(self, threads: Threads = SYSTEM_THREADS) -> None:
        self._lock = threads.lock()
        self._counts = ServerCounts()

    @property
    def counts(self) -> ServerCounts:
        """As they are now."""
        return self._counts

    def add(self, **more: int) -> None:
        """Count."""
        with self._lock:
            self._counts = replace(self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()})


class VerbDispatcher:
    """The verbs of one store."""

    def __init__(self, catalogue: Catalogue, storage: Storage) -> None:
        self._verbs: dict[tuple[str, str], tuple[Signature, Callable[..., Any]]] = {}
        for of, signatures, owner in (
            (OF_THE_CATALOGUE, CATALOGUE_SIGNATURES, catalogue),
            (OF_THE_STORAGE, STORAGE_SIGNATURES, storage),
        ):
            self._verbs |= {(of, name): (x, getattr(owner, name)) for name, x in signatures.items()}

    def carry_out(self, of: str, name: str, data: bytes) -> bytes:
        """Carry out the verb ``name`` with the arguments in ``data``; return its answer.

        Raises:
            ProtocolViolation: there is no such verb, or these are none of its arguments.
            Exception: what the verb raises.
        """
        if (of, name) not in self._verbs:
            raise ProtocolViolation("store server", f"a verb that there is not: {of}/{name}")
        signature, verb = self._verbs[of, name]
        return encode(verb(**_arguments(signature, data)))


def _arguments(signature: Signature, data: bytes) -> dict[str, Any]:
    told = decode(data, signature.takes)
    found = {name: getattr(told, name) for name in signature.takes.__struct_fields__}
    for name, kinds in signature.kinds.items():
        found[name] = _of_its_kind(kinds, found[name])
    if signature.judge:
        found[signature.judge] = _mine(found[signature.judge])
    return found


def _of_its_kind(kinds: Mapping[str, type], told: tuple[str, Any]) -> object:
    kind = kinds.get(told[0])
    if kind is None:
        raise ProtocolViolation("store server", f"a value of the unknown kind {told[0]!r}")
    try:
        return msgspec.convert(told[1], decodable(kind))
    except (msgspec.ValidationError, ValueError) as error:
        raise ProtocolViolation("store server", f"no {told[0]}: {error}") from error


def _mine(judged: Judged) -> Mine:
    known = dict(judged)

    def is_mine(owner: Owner) -> bool:
        if owner not in known:
            raise UnjudgedError(owner)
        return known[owner]

    return is_mine


NEWS_S = 25.0
"""How long a client waits for news before it asks again."""

SETTLE_S = 10.0
"""How long a client waits for a request under way before it asks again for the lost answer."""

CHECK_S = 20.0

VERB = "/verb/"

_log = logging.getLogger("headgate")


class RequestHandlers:
    """What there is to say about one store."""

    def __init__(
        self,
        catalogue: Catalogue,
        storage: ChunkStorage,
        instance: str,
        counting: ServerMetrics,
        around: Environment = SYSTEM_ENVIRONMENT,
    ) -> None:
        self._catalogue = catalogue
        self._storage = storage
        self._instance = instance
        self._counting = counting
        self._clock: Clock = around
        self._carrying = VerbDispatcher(catalogue, storage)
        self._settling = Deduplication(around)
        self._news = ChangeFeed(catalogue.changes, around)
        first = int.from_bytes(around.token(5))
        self._checking = CheckJobs(lambda verify: check_store(catalogue, storage, verify_events=verify), first, around)

    def close(self) -> None:
        """Wake all clients that wait for news."""
        self._news.close()

    def answer(self, path: str, name: str | None, data: bytes) -> tuple[int, bytes]:
        """Return status and answer; ``name`` is that of a question that may change something."""
        if path.startswith(VERB):
            of, _, verb = path.removeprefix(VERB).partition("/")
            return self._once(name, lambda: self._carry_out(of, verb, data))
        if path == NEWS:
            return self._said(lambda: encode(self._tell(decode(data, SeenChanges))))
        asked: dict[str, Callable[[], object]] = {
            SETTLE: lambda: self._settling.settle(decode(data, str), SETTLE_S),
            DATE: self._clock.wall_ms,
            UNTOUCHED: lambda: self._catalogue.is_untouched,
            CHECK: lambda: self._check(decode(data, CheckRequest)),
        }
        if path not in asked:
            return http.HTTPStatus.NOT_FOUND, b"there is no such question"
        return self._counted(self._said(lambda: encode(asked[path]())))

    def take_chunk(self, path: str, name: str | None, parts: Iterable[bytes], *, if_absent: bool) -> tuple[int, bytes]:
        """Keep a chunk.

        Raises:
            IncompleteError: it did not come whole and undamaged; nothing was kept.
        """
        put = self._storage.put_if_absent if if_absent else self._storage.put

        def counted() -> Iterable[bytes]:
            for part in parts:
                self._counting.add(bytes_in=len(part))
                yield part

        def take() -> bytes:
            put(path, counted())
            return b""

        return self._once(name, take)

    def give_chunk(self, path: str, offset: int, size_bytes: int | None) -> Range | tuple[int, bytes]:
        """Return what to give of a chunk, or why not."""
        found: list[Range] = []

        def look() -> bytes:
            found.append(Range(self._storage, path, offset, size_bytes))
            return b""

        status, data = self._counted(self._said(look))
        if not found:
            return status, data
        self._counting.add(bytes_out=found[0].size_bytes)
        return found[0]

    def _once(self, name: str | None, work: Callable[[], bytes]) -> tuple[int, bytes]:
        """Do it unless it was given up; remember the answer, which may be lost on its way (SS9)."""
        if name is None:
            return self._counted(self._said(work))
        try:
            with self._settling.under_way(name) as outcome:
                outcome.status, outcome.data = self._counted(self._said(work))
                return outcome.status, outcome.data
        except VoidError:
            return http.HTTPStatus.GONE, b"the question was given up before it came, or comes twice"

    def _carry_out(self, of: str, verb: str, data: bytes) -> bytes:
        try:
            return self._carrying.carry_out(of, verb, data)
        finally:
            # also after an error: it may have taken effect all the same
            if of == OF_THE_CATALOGUE and verb in VERBS and not VERBS[verb].is_reading:
                self._news.changed()

    def _tell(self, seen: SeenChanges) -> SeenChanges:
        number = seen.number if seen.instance == self._instance else -1
        return SeenChanges(self._instance, self._news.wait(number, NEWS_S))

    def _check(self, asked: CheckRequest) -> object:
        return self._checking.ask(asked.number, CHECK_S, verify_events=asked.verify_events)

    def _said(self, work: Callable[[], bytes]) -> tuple[int, bytes]:
        """Return what ``work`` returns, or what it raises, as an answer."""
        try:
            return http.HTTPStatus.OK, work()
        except IncompleteError:
            raise
        except ProtocolViolation as violation:
            return http.HTTPStatus.BAD_REQUEST, str(violation).encode(errors="replace")
        except Exception as error:
            failure = encode_failure(error)
            if failure is not None:
                return http.HTTPStatus.UNPROCESSABLE_ENTITY, failure
            _log.exception("the server of a store could not answer a question")
            said = f"the server failed, which its output says more about: {type(error).__name__}: {error}"
            return http.HTTPStatus.INTERNAL_SERVER_ERROR, said.encode(errors="replace")

    def _counted(self, answer: tuple[int, bytes]) -> tuple[int, bytes]:
        status = answer[0]
        self._counting.add(
            requests=1,
            errors=int(status == http.HTTPStatus.UNPROCESSABLE_ENTITY),
            failures=int(status == http.HTTPStatus.INTERNAL_SERVER_ERROR),
            refused=int(status == http.HTTPStatus.BAD_REQUEST),
        )
        return answer
