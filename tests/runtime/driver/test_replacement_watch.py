"""An idle driver looks whether another one has taken the pipeline over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headgate.errors import StorageError
from headgate.model.ids import Generation
from headgate.runtime.driver.takeover import HANGS_MS, LOOKS_MAX, ReplacementWatch


class Looked:
    """A log that answers as told, and a storage thread that runs when it is let."""

    def __init__(self, *answers: Generation | StorageError | None) -> None:
        self._answers = list(answers)
        self.waiting: list[Callable[[], object]] = []
        self.replaced: list[Generation] = []
        self.now_ms = 0
        self.pools = 0
        self.watch = ReplacementWatch(self, self, self, self.replaced.append, self)  # type: ignore[arg-type]

    def monotonic_ms(self) -> int:
        return self.now_ms

    def pool(self, size: int, name: str, *, is_daemon: bool) -> Looked:
        assert is_daemon, "a look that hangs does not keep the process alive"
        self.pools += 1
        return self

    def shutdown(self, *, wait: bool) -> None:
        assert not wait

    def newer_generation(self) -> Generation | None:
        answer = self._answers.pop(0)
        if isinstance(answer, StorageError):
            raise answer
        return answer

    def submit(self, call: Callable[..., object], /, *arguments: Any) -> None:
        self.waiting.append(lambda: call(*arguments))

    def post(self, call: Callable[[], None]) -> None:
        call()

    def look(self) -> None:
        self.watch.look()
        while self.waiting:
            self.waiting.pop(0)()


def test_an_idle_driver_hears_of_the_one_that_replaced_it() -> None:  # C38, X9
    looked = Looked(None, Generation(5))
    looked.look()
    assert looked.replaced == []
    looked.look()
    assert looked.replaced == [5]


def test_storage_that_does_not_answer_replaces_nobody_and_is_asked_again() -> None:
    looked = Looked(StorageError("list", "p/log", "gone for a while", is_transient=True), Generation(5))
    looked.look()
    assert looked.replaced == []
    looked.look()
    assert looked.replaced == [5]


def test_there_is_one_look_at_a_time() -> None:
    looked = Looked(None)
    looked.watch.look()
    looked.watch.look()
    assert len(looked.waiting) == 1


def test_a_look_that_hangs_is_not_waited_for() -> None:  # C38
    """On a connection that is dead a request may take minutes; one on another connection does not."""
    looked = Looked(Generation(5))
    looked.watch.look()
    looked.now_ms += HANGS_MS - 1
    looked.watch.look()
    assert len(looked.waiting) == 1
    looked.now_ms += 1
    looked.watch.look()
    _, beside = looked.waiting
    beside()
    assert looked.replaced == [5]
    assert looked.pools == 1


def test_only_so_many_looks_hang() -> None:
    looked = Looked(*[None] * (LOOKS_MAX + 1))
    for _ in range(3 * LOOKS_MAX):
        looked.watch.look()
        looked.now_ms += HANGS_MS
    assert len(looked.waiting) == LOOKS_MAX
    looked.waiting.pop(0)()
    looked.watch.look()
    assert len(looked.waiting) == LOOKS_MAX
