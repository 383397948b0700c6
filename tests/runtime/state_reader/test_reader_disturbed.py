"""Reading state while something happens: any damage, and a pipeline that removes what it does not need any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.runtime.checkpoints.frozen_cases import Holder, by_row
from tests.runtime.state_reader.written import Written, state

import headgate as hg
from headgate.errors import CorruptionError, HeadgateError, StorageError
from headgate.model.ids import CheckpointId
from headgate.state.descriptors import StateKind
from headgate.storage.local import LocalStorage

PLACES = 5
"""At so many places each file is damaged."""


def everything(path: Path) -> dict[tuple[str, str], pl.DataFrame]:
    catalog = hg.state_catalog(path)
    return {(o, s): hg.read_state(path, o, s) for o, s in catalog.select("operator", "state").rows()}


def same(found: dict[tuple[str, str], pl.DataFrame], expected: dict[tuple[str, str], pl.DataFrame]) -> bool:
    return found.keys() == expected.keys() and all(found[one].equals(expected[one]) for one in found)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@pytest.mark.parametrize("kind", [StateKind.VALUE, StateKind.MAP])
@pytest.mark.parametrize("change", [flipped, lambda data, at: data[:at]], ids=["flipped", "cut"])
def test_damage_anywhere_is_one_sentence_or_does_not_matter(
    tmp_path: Path, kind: StateKind, change: Callable[[bytes, int], bytes]
) -> None:
    written = Written(tmp_path)
    complete(written, by_row(kind), 1)
    path = written.path
    expected = everything(path)
    told: list[HeadgateError] = []
    for file in sorted(path.rglob("*")):
        data = file.read_bytes() if file.is_file() else b""
        for at in range(0, len(data), max(1, len(data) // PLACES + 1)):
            file.write_bytes(change(data, at))
            try:
                assert same(everything(path), expected), f"{file} at {at}: other rows are shown"
            except HeadgateError as error:
                told.append(error)
        if data:
            file.write_bytes(data)
    assert len([error for error in told if isinstance(error, CorruptionError)]) > PLACES
    assert not [error for error in told if "\n" in str(error)]


class Striking:
    """Completes the next checkpoint, and removes the one before it, at the ``number``-th look at the storage."""

    def __init__(self, written: Written, live: Holder, number: int) -> None:
        self._written, self._live, self._number = written, live, number
        self.looks = 0

    def __call__(self) -> None:
        self.looks += 1
        if self.looks == self._number:
            complete(self._written, self._live, 2)
            self._written.log.drop(CheckpointId(1), CheckpointId(2))


def complete(written: Written, live: Holder, checkpoint: int) -> None:
    live.change()
    written.complete(checkpoint, {"node": live.spec.state_text()}, [state(live.freeze())])


def test_whenever_retention_strikes_it_is_rows_of_one_checkpoint_or_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[object] = []
    number = 1
    while True:
        live, written = by_row(StateKind.VALUE), Written(tmp_path / str(number))
        complete(written, live, 1)
        first = sorted(hg.read_state(written.path, "node").rows())
        strike = Striking(written, live, number)
        with monkeypatch.context() as patch:
            for name in ("get", "get_range", "list"):
                patch.setattr(LocalStorage, name, struck(getattr(LocalStorage, name), strike))
            found = rows_or_why_not(written.path)
        if strike.looks < number:
            break
        second = sorted(hg.read_state(written.path, "node").rows())
        assert first != second
        outcomes.append("newest" if found == second else found)
        number += 1
    sentence = "cannot read checkpoint 1 of pipeline 'p': its files were removed meanwhile"
    assert outcomes[0] == "newest", "before it was chosen"
    assert all(one == "newest" or str(one).startswith(sentence) for one in outcomes), outcomes
    assert outcomes[-1] != "newest", "behind that"


def rows_or_why_not(path: Path) -> object:
    try:
        return sorted(hg.read_state(path, "node").rows())
    except StorageError as error:
        return str(error)


def struck(method: Callable[..., Any], strike: Striking) -> Callable[..., Any]:
    def look(self: LocalStorage, *arguments: Any) -> Any:
        strike()
        return method(self, *arguments)

    return look
