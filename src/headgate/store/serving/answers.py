"""What a server has to say to known clients, question by question.

Counterparts: ``connections`` brings the questions, ``carrying``, ``settling``, ``news`` and ``checking`` know the
answers. Source: SS6, SS9 and SS18 of docs/spec/served-store.md.
"""

from __future__ import annotations

import http
import logging
from collections.abc import Callable, Iterable

from headgate.around import SYSTEM_AROUND, Around
from headgate.clock import Clock
from headgate.errors import ProtocolViolation
from headgate.store.catalogue.base import Catalogue
from headgate.store.fsck import check_store
from headgate.store.served.checked import CHECK, CheckAsked
from headgate.store.served.client import SETTLE
from headgate.store.served.failures import encode_failure
from headgate.store.served.hearing import NEWS, Seen
from headgate.store.served.served_catalogue import DATE, UNTOUCHED
from headgate.store.served.values import decode, encode
from headgate.store.served.verbs import OF_THE_CATALOGUE, READING
from headgate.store.serving.carrying import Carrying
from headgate.store.serving.checking import Checking
from headgate.store.serving.chunks import ChunkStorage, IncompleteError, Range
from headgate.store.serving.counting import Counting
from headgate.store.serving.news import News
from headgate.store.serving.settling import Settling, VoidError

NEWS_S = 25.0
"""So long whoever asks for news waits for some, and then asks again."""

SETTLE_S = 10.0
"""So long whoever asks for a lost answer waits for what is under way, and then asks again."""

CHECK_S = 20.0

VERB = "/verb/"

_log = logging.getLogger("headgate")


class Answers:
    """What there is to say about one store."""

    def __init__(
        self,
        catalogue: Catalogue,
        storage: ChunkStorage,
        instance: str,
        counting: Counting,
        around: Around = SYSTEM_AROUND,
    ) -> None:
        self._catalogue = catalogue
        self._storage = storage
        self._instance = instance
        self._counting = counting
        self._clock: Clock = around
        self._carrying = Carrying(catalogue, storage)
        self._settling = Settling(around)
        self._news = News(catalogue.changes, around)
        first = int.from_bytes(around.token(5))
        self._checking = Checking(lambda verify: check_store(catalogue, storage, verify_events=verify), first, around)

    def close(self) -> None:
        """Let everybody go who waits for news."""
        self._news.close()

    def answer(self, path: str, name: str | None, data: bytes) -> tuple[int, bytes]:
        """Return status and answer; ``name`` is that of a question that may change something."""
        if path.startswith(VERB):
            of, _, verb = path.removeprefix(VERB).partition("/")
            return self._once(name, lambda: self._carry_out(of, verb, data))
        if path == NEWS:
            return self._said(lambda: encode(self._tell(decode(data, Seen))))
        asked: dict[str, Callable[[], object]] = {
            SETTLE: lambda: self._settling.settle(decode(data, str), SETTLE_S),
            DATE: self._clock.wall_ms,
            UNTOUCHED: lambda: self._catalogue.is_untouched,
            CHECK: lambda: self._check(decode(data, CheckAsked)),
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
            if of == OF_THE_CATALOGUE and verb not in READING:
                self._news.changed()

    def _tell(self, seen: Seen) -> Seen:
        number = seen.number if seen.instance == self._instance else -1
        return Seen(self._instance, self._news.wait(number, NEWS_S))

    def _check(self, asked: CheckAsked) -> object:
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
