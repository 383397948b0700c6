"""An idle driver looks whether another one has taken the pipeline over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headgate.errors import StorageError
from headgate.model.ids import Generation
from headgate.runtime.driver.replacement_watch import ReplacementWatch


class Looked:
    """A log that answers as told, and a storage thread that runs when it is let."""

    def __init__(self, *answers: Generation | StorageError | None) -> None:
        self._answers = list(answers)
        self.waiting: list[Callable[[], object]] = []
        self.replaced: list[Generation] = []
        self.watch = ReplacementWatch(self, self, self, self.replaced.append)  # type: ignore[arg-type]

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
