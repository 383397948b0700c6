"""How a generation begins for hooks: behind the recovery of the sinks, with what the checkpoint holds (EI8, EI9)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runtime.driver.test_claims import CALLS, Place

import headgate as hg
from headgate.errors import StorageError, UsageError
from headgate.model.manifest import HookState, Manifest
from headgate.model.plan import HookSpec
from headgate.runtime.driver import restart
from headgate.runtime.driver.hook_calls import HookCalls
from headgate.runtime.driver.restart import Finished, NewGeneration, begin_generation


class Recorded(hg.CoordinatorHook):
    """Notes its calls where the sinks note theirs."""

    def __init__(self, failures: int = 0, *, is_transient: bool = True) -> None:
        self.failures, self.is_transient = failures, is_transient

    def trigger(self, checkpoint_id: int) -> None:
        return None

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        self._note(f"restore {checkpoint_id} {data!r}")

    def reset(self) -> None:
        self._note("reset")

    def _note(self, call: str) -> None:
        CALLS.append((call, []))
        if self.failures:
            self.failures -= 1
            raise StorageError("reach", "the shop", "closed", is_transient=self.is_transient)


class HookedPlace(Place):
    """A pipeline with a hook, whose checkpoints hold something of it."""

    def __init__(self, root: Path, hook: Recorded) -> None:
        super().__init__(root)
        self.definition = replace(self.definition, hooks=(HookSpec("shop", hook, 60_000),))
        self.calls = HookCalls(self.definition.hooks)

    def begin_with_hooks(self) -> NewGeneration | Finished:
        return begin_generation(self.definition, self.log, "test", self.notes.append, None, hooks=self.calls)

    def complete_with(self, checkpoint: int, *states: HookState, is_final: bool = False) -> None:
        append = self.log.append
        self.log.append = lambda made: append(replace(made, hooks=states))  # type: ignore[method-assign]
        self.complete(checkpoint, 1, is_final=is_final)
        self.log.append = append  # type: ignore[method-assign]


@pytest.fixture
def hook() -> Recorded:
    return Recorded()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Recorded) -> Iterator[HookedPlace]:
    monkeypatch.setattr(restart, "RETRY_PAUSES_S", (0.0, 0.0))
    made = HookedPlace(tmp_path, hook)
    yield made
    made.calls.close()


def test_hooks_go_back_behind_the_sinks(place: HookedPlace) -> None:  # EI8
    place.begin_with_hooks()
    assert CALLS == [("recover", []), ("reset", [])]
    place.complete_with(1, HookState("shop", b"at 1"))
    CALLS.clear()
    assert isinstance(place.begin_with_hooks(), NewGeneration)
    assert CALLS == [("recover", [1]), ("commit 1 as 2", [1]), ("restore 1 b'at 1'", [])]


def test_a_hook_that_a_checkpoint_does_not_know_is_restored_with_nothing(place: HookedPlace) -> None:  # EI8
    place.begin_with_hooks()
    place.complete(1, 1)
    place.begin_with_hooks()
    assert CALLS[-1] == ("restore 1 None", [])


def test_a_finished_pipeline_calls_no_hook(place: HookedPlace) -> None:
    place.begin_with_hooks()
    place.complete_with(1, HookState("shop", b"at 1"), is_final=True)
    CALLS.clear()
    assert isinstance(place.begin_with_hooks(), Finished)
    assert [call for call, _ in CALLS] == ["recover", "commit 1 as 2", "close"]


def test_a_hook_that_may_pass_is_tried_again_and_one_that_does_not_fails_the_claim(
    place: HookedPlace, hook: Recorded
) -> None:  # EI8
    hook.failures = 2
    assert isinstance(place.begin_with_hooks(), NewGeneration)
    assert CALLS.count(("reset", [])) == 3
    hook.failures, hook.is_transient = 1, False
    CALLS.clear()
    with pytest.raises(StorageError, match="cannot reach the shop: closed"):
        place.begin_with_hooks()
    assert CALLS[-1] == ("close", []), "committers are not left open"


def test_data_that_nobody_takes_back_is_refused_before_a_sink_is_touched(place: HookedPlace) -> None:  # EI9
    place.begin_with_hooks()
    place.complete_with(1, HookState("shop", b"at 1"), HookState("bank", b"12"))
    CALLS.clear()
    with pytest.raises(UsageError, match=r"holds 2 bytes of hook 'bank'.*say so with pipeline\.forget_hook\('bank'\)"):
        place.begin_with_hooks()
    assert CALLS == []
    place.definition = replace(place.definition, forgotten_hooks=frozenset({"bank"}))
    assert isinstance(place.begin_with_hooks(), NewGeneration)


def test_a_manifest_holds_what_was_given(place: HookedPlace) -> None:  # EI4
    place.begin_with_hooks()
    place.complete_with(1, HookState("shop", b"at 1"))
    found = [e.content for e in place.log.observe().entries if isinstance(e.content, Manifest)]
    assert found[0].hooks == (HookState("shop", b"at 1"),)
