"""Mutants: break one guarantee on purpose, and see a test or a seed of the simulator fail.

A mutant is a context manager that patches one function or method with a version that breaks a rule::

    @contextmanager
    def encoding_releases_the_state() -> Iterator[None]:
        with patched(FrozenRows, "encode", encode_once):
            yield

    def test_encoding_that_releases_is_caught(tmp_path: Path) -> None:
        assert_caught(encoding_releases_the_state, test_a_snapshot_written_twice_is_the_same, tmp_path)

Bugs that seeds of the simulator find are in the files beside this one.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import headgate

Mutant = Callable[[], AbstractContextManager[None]]


_PLANTED: list[tuple[object, str, object]] = []
"""What was planted since somebody looked: owner, name, replacement."""


def left_behind() -> list[str]:
    """Return where a replacement is still in its place, and forget all of them."""
    left = [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, name, replacement in _PLANTED
        if inspect.getattr_static(owner, name, None) is replacement
    ]
    _PLANTED.clear()
    return left


@contextmanager
def patched(owner: object, name: str, replacement: object) -> Iterator[None]:
    """Replace the attribute ``name`` of a class or module for the time of the block; it must exist."""
    assert hasattr(owner, name), f"{owner!r} has no attribute {name!r}: the mutant is out of date"
    if replacement is not inspect.getattr_static(owner, name):
        _PLANTED.append((owner, name, replacement))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, replacement)
        yield


_TESTS = Path(__file__).resolve().parents[1]
_PRODUCT = Path(headgate.__file__).resolve().parent
OUT_OF_TIME = "Timeout ("
"""How the words of pytest-timeout begin."""
_PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
"""Of Hypothesis, under a mutant."""
_CLUMSY = (AttributeError, TypeError, NameError, ImportError)
"""What code raises that does not know what it is about."""


def _is_of_the_mutant(error: BaseException) -> bool:
    """Whether the product called code of the tests, and that stumbled."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    is_called_by_product = any(file.is_relative_to(_PRODUCT) for file in files)
    return isinstance(error, _CLUMSY) and files[-1].is_relative_to(_TESTS) and is_called_by_product


def assert_caught(mutant: Mutant, test: Callable[..., object], *args: object) -> None:
    """Expect ``test``, which passes without it, to fail under ``mutant``.

    What counts as caught is any exception of the test: a failed assertion or an error of the product. A mutant whose
    own code fails, because what it patches has changed, breaks no rule: it is out of date.
    """
    caught = _caught(mutant, test, *args)
    if caught is None:
        raise AssertionError(f"mutant '{mutant.__name__}' survives {test.__name__}")  # type: ignore[attr-defined]
    if _is_of_the_mutant(caught):
        raise AssertionError(f"the mutant is out of date: its own code raised {caught!r}") from caught


@contextmanager
def _drawing_alike(test: Callable[..., object]) -> Iterator[None]:
    """Have Hypothesis draw the same in every run, and stop at what fails: what catches a mutant catches it tomorrow.

    The first example that fails is enough: nobody reads the smallest, whose search takes longer than everything else.
    """
    if not getattr(test, "is_hypothesis_test", False):
        yield
        return
    drawn = hypothesis.settings(
        getattr(test, "_hypothesis_internal_use_settings", hypothesis.settings()), phases=_PHASES, database=None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test, "_hypothesis_internal_use_seed", None, raising=False)  # put back afterwards
        patch.setattr(test, "_hypothesis_internal_use_settings", drawn, raising=False)
        hypothesis.seed(0)(test)
        yield


@contextmanager
def _patches_of_its_own(args: tuple[object, ...]) -> Iterator[list[object]]:
    """Have what the test patches be put back before the mutant ends.

    Else a test that patches what the mutant has patched puts the planted bug back at its own end, for all tests behind.
    """
    with ExitStack() as opened:
        yield [opened.enter_context(arg.context()) if isinstance(arg, pytest.MonkeyPatch) else arg for arg in args]


def _caught(mutant: Mutant, test: Callable[..., object], *given: object) -> BaseException | None:
    with mutant(), _drawing_alike(test), _patches_of_its_own(given) as args:
        try:
            test(*args)
        except (Exception, pytest.fail.Exception) as error:
            if str(error).startswith(OUT_OF_TIME):
                raise  # the time limit of the test ended it: nothing was noticed
            return error
    return None


# -- ways to patch ---------------------------------------------------------------------------------------------------


def around(owner: object, name: str, change: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replace a function or method by ``change(original, *arguments)``; a method's first argument is ``self``."""
    original = getattr(owner, name)
    return patched(owner, name, lambda *a, **options: change(original, *a, **options))


def skipped(owner: object, name: str, result: object = None) -> AbstractContextManager[None]:
    """Have a function or method do nothing but return ``result``."""
    return patched(owner, name, lambda *a, **options: result)


@contextmanager
def all_of(*patches: AbstractContextManager[None]) -> Iterator[None]:
    """Apply several patches."""
    with ExitStack() as opened:
        for patch in patches:
            opened.enter_context(patch)
        yield
