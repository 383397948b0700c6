"""What identifies an operator's state in checkpoints: one text, written here and nowhere else (ST2, TM6).

A manifest holds the text of every operator; state is restored where the text is the same, or can become the same
(``model.identity_parts``). Names of columns and states may hold whatever stands between names, so here a text is never
cut into parts: it is asked whether it reads as something, and where that can be in two ways, the answer is no.
Counterparts: operators and sources, which say what is in a text; ``protocol.checkpoints.recovery`` and
``runtime.stored_state``, which ask.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Form(Enum):
    """Whose state it is, by how its text begins."""

    KEYED = "keyed state(keys "
    REDUCE = "reduce(keys "
    WINDOW_RECORDS = "window-buffer("
    WINDOW_RESULTS = "window-merge("
    LINES = "files of lines"
    PARQUET = "parquet files"
    STREAM = "stream "
    GENERATOR = "generator, version 1"
    ROWS = "rows, version 1"
    OTHER = ""


_LISTS = "operator state("
_TIMERS = "timers"


@dataclass(frozen=True, slots=True)
class StateIdentity:
    """The identity of the state of one operator. ``text``: as manifests hold it, "" without state."""

    text: str

    # -- writing ----------------------------------------------------------------------------------------------------

    @classmethod
    def of_keyed(cls, keys: Sequence[tuple[str, str]], states: Sequence[str], *, has_timers: bool) -> StateIdentity:
        """Of a process function: columns of the key with their types, and ``declared`` states.

        Timers are only in it where there is nothing else, so that a function can be given timers later (TM6).
        """
        inner = list(states) or ([_TIMERS] if has_timers else [])
        return cls(f"{Form.KEYED.value}{_columns(keys)}; {'; '.join(inner)})" if inner else "")

    @classmethod
    def of_reduce(cls, keys: Sequence[str], columns: str) -> StateIdentity:
        """Of a reduction by ``keys`` of records with ``columns``."""
        return cls(f"{Form.REDUCE.value}{', '.join(keys)}; columns {columns})")

    @classmethod
    def of_windows(
        cls, form: Form, size_ms: int, time: str, keys: Sequence[tuple[str, str]], parts: Sequence[str]
    ) -> StateIdentity:
        """Of tumbling windows of ``size_ms`` on the column ``time``; ``parts``: what is kept."""
        return cls(f"{form.value}tumbling {size_ms} ms on {time}; keys {_columns(keys)}; {'; '.join(parts)})")

    @classmethod
    def of_lists(cls, lists: Sequence[str]) -> StateIdentity:
        """Of the lists that belong to a subtask, each as ``declared``."""
        return cls(f"{_LISTS}{'; '.join(lists)})" if lists else "")

    def beside(self, other: StateIdentity) -> StateIdentity:
        """Return the identity of both, of the keys' state first."""
        return StateIdentity("; ".join(text for text in (self.text, other.text) if text))

    # -- reading ----------------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        """Whether there is state."""
        return bool(self.text)

    @property
    def form(self) -> Form:
        """Whose state it is."""
        return next(form for form in Form if self.text.startswith(form.value))

    def adds_timers_to(self, before: StateIdentity) -> bool:
        """Whether a function without keyed state was given ``on_timer`` since, and nothing else (TM6)."""
        end = f"; {_TIMERS})" + (f"; {before.text}" if before else "")
        return self.form is Form.KEYED and self.text.endswith(end)

    def declares(self, kind: str, name: str) -> bool:
        """Whether a keyed state of this kind and name is declared; no list of the operator is one."""
        return f"; {kind} {name}: " in self.text.partition(f"; {_LISTS}")[0]

    def key_names(self, types: Sequence[str]) -> tuple[str, ...]:
        """Return the names of a process function's key columns, which have these types; () if they are not clear."""
        pattern = ", ".join(f"(.+?): {re.escape(dtype)}" for dtype in types)
        ends = rf"; (?:(?:value|list|map) |{_TIMERS}\)$)"
        found = re.match(re.escape(Form.KEYED.value) + pattern + ends, self.text, re.DOTALL)
        names = () if found is None else found.groups()
        return () if any(": " in name or "; " in name for name in names) else names

    def keys_among(self, columns: Mapping[str, str]) -> tuple[str, ...]:
        """Return the key columns of a reduction or of windows: of ``columns``, which have these types.

        Nothing if the text can be read in two ways: rows must never be chosen by a wrong key.
        """
        start = Form.REDUCE.value if self.form is Form.REDUCE else "; keys "
        at = self.text.find(start)
        ways = set() if at < 0 else {*_names_at(self.text[at + len(start) :], columns)}
        found = [names for names in ways if len({*names}) == len(names)]
        return found[0] if len(found) == 1 else ()

    @property
    def window_ms(self) -> int:
        """The length of the windows of ``WINDOW_RESULTS``; 0 where it does not say."""
        found = re.match(re.escape(Form.WINDOW_RESULTS.value) + r"tumbling (\d+) ms on ", self.text)
        return int(found.group(1)) if found else 0


def declared(kind: str, name: str, dtype: str) -> str:
    """Return the part of one declared state or list in a text."""
    return f"{kind} {name}: {dtype}"


def _columns(columns: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name}: {dtype}" for name, dtype in columns)


def _names_at(text: str, columns: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield every way to read ``text``, up to a semicolon, as names, with their types or not."""
    for column, dtype in columns.items():
        for name in (f"{column}: {dtype}", column):
            if text.startswith(f"{name}; "):
                yield (column,)
            if text.startswith(f"{name}, "):
                yield from ((column, *more) for more in _names_at(text[len(name) + 2 :], columns))
