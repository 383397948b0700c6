"""Mutants that named tests find: break one guarantee on purpose, and see a test fail.

A mutant is a context manager that patches one function or method with a version that breaks a rule::

    @contextmanager
    def encoding_releases_the_state() -> Iterator[None]:
        with patched(FrozenRows, "encode", encode_once):
            yield

    def test_encoding_that_releases_is_caught(tmp_path: Path) -> None:
        assert_caught(encoding_releases_the_state, test_a_snapshot_written_twice_is_the_same, tmp_path)

Bugs that seeds of the simulator find are planted in ``tests/sim/product``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

Mutant = Callable[[], AbstractContextManager[None]]


@contextmanager
def patched(owner: object, name: str, replacement: object) -> Iterator[None]:
    """Replace the attribute ``name`` of a class or module for the time of the block; it must exist."""
    assert hasattr(owner, name), f"{owner!r} has no attribute {name!r}: the mutant is out of date"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, replacement)
        yield


def assert_caught(mutant: Mutant, test: Callable[..., object], *args: object) -> None:
    """Expect ``test``, which passes without it, to fail under ``mutant``.

    What counts as caught is any exception of the test: a failed assertion or an error of the product.
    """
    with mutant():
        try:
            test(*args)
        except (Exception, pytest.fail.Exception):
            return
    raise AssertionError(f"mutant '{mutant.__name__}' survives {test.__name__}")  # type: ignore[attr-defined]
