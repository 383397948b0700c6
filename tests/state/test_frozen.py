"""What was frozen is held until it is released, once, and never encoded afterwards (ST15, U6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from headgate.state.snapshot import FrozenState


class Counted(FrozenState):
    forgotten = 0

    def _rows(self) -> Mapping[str, int]:
        return {"state": 3}

    def _encode(self) -> Sequence[bytes]:
        return [b"bytes"]

    def _forget(self) -> None:
        self.forgotten += 1
        if self.forgotten == 1:
            raise OSError("the first try fails")


def test_what_was_frozen_is_released_once_also_when_the_first_try_failed() -> None:
    frozen = Counted()
    assert (frozen.rows(), frozen.encode(), frozen.encode()) == ({"state": 3}, [b"bytes"], [b"bytes"])
    with pytest.raises(OSError, match="the first try fails"):
        frozen.release()
    assert frozen.encode() == [b"bytes"], "nobody has released it yet"
    frozen.release()
    frozen.release()
    assert frozen.forgotten == 2
    for ask in (frozen.rows, frozen.encode):
        with pytest.raises(AssertionError, match="Counted was released: it has nothing to write any more"):
            ask()
