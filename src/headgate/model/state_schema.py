"""What the state of an operator is: types of its values, its identity in checkpoints, and the parts of that (EV1).

A manifest holds one text for every operator (TM6), written here alone; state is restored where the text is the
same, or can become the same. Types are what Arrow writes of them, read without Arrow. What stands between names is
in no name: one that has it stands in quotes, with that escaped (``name_text``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import TypeAlias

from headgate.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Plain:
    """A type without others in it, such as ``int64``, ``timestamp[us]`` or ``decimal128(10, 2)``."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of elements of one type."""

    element: ValueType

    def __str__(self) -> str:
        return f"large_list<item: {self.element}>"


@dataclass(frozen=True, slots=True)
class StructOf:
    """Fields by name; also the columns of a record."""

    fields: tuple[tuple[str, ValueType], ...]

    def __str__(self) -> str:
        return f"struct<{columns_text(self.fields)}>"


ValueType: TypeAlias = Plain | ListOf | StructOf

_LIST = "large_list<item: "
_STRUCT = "struct<"
_NAME = re.compile(r'("(?:[^"\\:;,<>\x00-\x1f\x7f]|\\u[0-9a-f]{4})+"|[^":;,<>][^:;,<>]*): ')
_BETWEEN_COLUMNS = re.compile(r"[:;,<>\x00-\x1f\x7f]")
_BETWEEN_STATES = re.compile(r"[:;\x00-\x1f\x7f]")
_ESCAPED = re.compile(r'[:;,<>"\\\x00-\x1f\x7f]')
_ESCAPE = re.compile(r"\\u([0-9a-f]{4})")
_PLAIN = re.compile(r"\w+(\[\w+(, tz=UTC)?\]|\(\d+, -?\d+\))?")

NESTED_MAX = 100
"""So deeply is a type nested at most, which is deeper than Arrow writes any: no text takes more stack than there is."""


def name_text(name: str) -> str:
    """Return the name of a column or field as texts have it; no two names have one text."""
    return _quoted(name, _BETWEEN_COLUMNS)


def _quoted(name: str, between: re.Pattern[str]) -> str:
    """Return a name as it is, or in quotes if it has in it what stands ``between`` names."""
    if name and not name.startswith('"') and between.search(name) is None:
        return name
    return '"' + _ESCAPED.sub(lambda found: f"\\u{ord(found.group()):04x}", name) + '"'


def name_of(text: str) -> str:
    """Return the name that ``name_text`` wrote."""
    return _ESCAPE.sub(lambda found: chr(int(found.group(1), 16)), text[1:-1]) if text.startswith('"') else text


def columns_text(columns: tuple[tuple[str, ValueType], ...]) -> str:
    """Return ``name: type, …``."""
    return _columns([(name, str(dtype)) for name, dtype in columns])


def read_type(text: str) -> ValueType | None:
    """Return the type that ``text`` says; None if it reads as none."""
    try:
        found, end = _type_at(text, 0, 0)
    except _UnreadableError:
        return None
    return found if end == len(text) else None


def read_columns(text: str) -> tuple[tuple[str, ValueType], ...] | None:
    """Return the columns that ``name: type, …`` says; None if it does not read as columns."""
    found = read_type(f"{_STRUCT}{text}>")
    return found.fields if isinstance(found, StructOf) else None


def inner_paths(dtype: ValueType, path: str = "") -> Iterator[tuple[str, ValueType]]:
    """Yield every field in ``dtype`` by its path, such as ``address.zip``; elements of lists add nothing to a path."""
    if isinstance(dtype, ListOf):
        yield from inner_paths(dtype.element, path)
    elif isinstance(dtype, StructOf):
        for name, inner in dtype.fields:
            here = path_of(path, name)
            yield here, inner
            yield from inner_paths(inner, here)


def path_of(parent: str, name: str) -> str:
    """Return the path of the field ``name`` in what has the path ``parent``."""
    return f"{parent}.{name}" if parent else name


class _UnreadableError(Exception):
    """The text is no type."""


def _type_at(text: str, at: int, depth: int) -> tuple[ValueType, int]:
    """Return the type that begins at ``at``, inside ``depth`` others, and where it ends."""
    if depth > NESTED_MAX:
        raise _UnreadableError
    if text.startswith(_LIST, at):
        element, end = _type_at(text, at + len(_LIST), depth + 1)
        return ListOf(element), _after(text, end, ">")
    if text.startswith(_STRUCT, at):
        return _fields_at(text, at + len(_STRUCT), depth + 1)
    found = _PLAIN.match(text, at)
    if found is None:
        raise _UnreadableError
    return Plain(found.group()), found.end()


def _fields_at(text: str, at: int, depth: int) -> tuple[StructOf, int]:
    fields: list[tuple[str, ValueType]] = []
    while not text.startswith(">", at):
        at = _after(text, at, ", ") if fields else at
        name = _NAME.match(text, at)
        if name is None:
            raise _UnreadableError
        dtype, at = _type_at(text, name.end(), depth)
        fields.append((name_of(name.group(1)), dtype))
    return StructOf(tuple(fields)), at + 1


def _after(text: str, at: int, wanted: str) -> int:
    if not text.startswith(wanted, at):
        raise _UnreadableError
    return at + len(wanted)


class Form(Enum):
    """Kind of the owner of a state, by how the text of the state begins."""

    KEYED = "keyed state(keys "
    WINDOW_RECORDS = "window-buffer("
    WINDOW_RESULTS = "window-merge("
    OPEN_WINDOWS = "open-windows("
    LINES = "files of lines"
    PARQUET = "parquet files"
    STREAM = "stream "
    KAFKA = "topics of Kafka cluster "
    POSTGRES = "changes of a PostgreSQL table "
    PRAVEGA = "stream of Pravega "
    GENERATOR = "generator, version 1"
    ROWS = "rows, version 1"
    REQUESTS = "records of requests without an answer"
    OTHER = ""


_LISTS = "operator state("
_TIMERS = "timers"


@dataclass(frozen=True, slots=True)
class StateIdentity:
    """The identity of the state of one operator. ``text``: as manifests hold it, "" without state."""

    text: str

    # -- writing ----------------------------------------------------------------------------------------------------

    @classmethod
    def of_keyed(
        cls, keys: Sequence[tuple[str, str]], states: Sequence[str], *, has_timers: bool, rule: Rule | None = None
    ) -> StateIdentity:
        """Of a process function: columns of the key with their types, and ``declared`` states.

        Timers are only in it where there is nothing else, so that a function can be given timers later (TM6).
        ``rule``: by which rows are kept, of operators of Headgate's own.
        """
        inner = list(states) or ([_TIMERS] if has_timers else [])
        inner += [] if rule is None else [str(rule)]
        return cls(f"{Form.KEYED.value}{_columns(keys)}; {'; '.join(inner)})" if inner else "")

    @classmethod
    def of_windows(
        cls, form: Form, windows: str, time: str, keys: Sequence[tuple[str, str]], parts: Sequence[str]
    ) -> StateIdentity:
        """Of ``windows``, such as "tumbling 1000 ms", on the column ``time``; ``parts``: what is kept."""
        return cls(f"{form.value}{windows} on {name_text(time)}; keys {_columns(keys)}; {'; '.join(parts)})")

    @classmethod
    def of_open_windows(cls, window: str, keys: Sequence[tuple[str, str]], parts: Sequence[str]) -> StateIdentity:
        """Of windows that are told apart by key, such as sessions: ``window`` says how; ``parts``: what is kept."""
        return cls(f"{Form.OPEN_WINDOWS.value}{window}; keys {_columns(keys)}; {'; '.join(parts)})")

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
        """The kind of its owner."""
        return next(form for form in Form if self.text.startswith(form.value))

    def adds_timers_to(self, before: StateIdentity) -> bool:
        """Whether a function without keyed state was given ``on_timer`` since, and nothing else (TM6)."""
        end = f"; {_TIMERS})" + (f"; {before.text}" if before else "")
        return self.form is Form.KEYED and self.text.endswith(end)

    def declares(self, kind: str, name: str) -> bool:
        """Whether a keyed state of this kind and name is declared; no list of the operator is one."""
        return f"; {declared(kind, name, '')}" in self.text.partition(f"; {_LISTS}")[0]

    def key_names(self, types: Sequence[str]) -> tuple[str, ...]:
        """Return the names of a process function's key columns, which have these types; () if they are not clear."""
        pattern = ", ".join(f"(.+?): {re.escape(dtype)}" for dtype in types)
        ends = rf"; (?:(?:value|list|map) |{_TIMERS}\)$)"
        found = re.match(re.escape(Form.KEYED.value) + pattern + ends, self.text, re.DOTALL)
        names = () if found is None else found.groups()
        return () if any(": " in name or "; " in name for name in names) else tuple(map(name_of, names))

    def keys_among(self, columns: Mapping[str, str]) -> tuple[str, ...]:
        """Return the key columns of windows: of ``columns``, which have these types.

        Nothing if the text can be read in two ways: rows must never be chosen by a wrong key.
        """
        start = "; keys "
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
    return f"{kind} {_quoted(name, _BETWEEN_STATES)}: {dtype}"


def column_text(name: str, dtype: str) -> str:
    """Return ``name: type`` of a column."""
    return f"{name_text(name)}: {dtype}"


def _columns(columns: Sequence[tuple[str, str]]) -> str:
    return ", ".join(column_text(name, dtype) for name, dtype in columns)


def _names_at(text: str, columns: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield every way to read ``text``, up to a semicolon, as names, with their types or not."""
    for column, dtype in columns.items():
        for name in (column_text(column, dtype), name_text(column)):
            if text.startswith(f"{name}; "):
                yield (column,)
            if text.startswith(f"{name}, "):
                yield from ((column, *more) for more in _names_at(text[len(name) + 2 :], columns))


_STATE = re.compile(r"(value|list|map|union|broadcast map) (.+?): (.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Reach:
    """Rows are kept as long as they find others: by the difference of their times in ms, right less left.

    Attributes:
        lower_ms: the least difference; None: any.
        upper_ms: the greatest one.
    """

    lower_ms: int | None
    upper_ms: int | None

    def __str__(self) -> str:
        return f"{_REACH}{_bound(self.lower_ms)} to {_bound(self.upper_ms)} ms"

    @property
    def words(self) -> str:
        """Return it for people."""
        lower = "" if self.lower_ms is None else f"from {self.lower_ms} ms "
        upper = "on" if self.upper_ms is None else f"to {self.upper_ms} ms"
        return f"right time - left time {lower}{upper}"

    def is_within(self, other: Reach) -> bool:
        """Whether every row that is needed for this was kept for ``other``."""
        is_above = other.lower_ms is None or (self.lower_ms is not None and self.lower_ms >= other.lower_ms)
        return is_above and (other.upper_ms is None or (self.upper_ms is not None and self.upper_ms <= other.upper_ms))


@dataclass(frozen=True, slots=True)
class InWindows:
    """Rows are kept until their window has ended. ``windows``: which ones, in words."""

    windows: str

    def __str__(self) -> str:
        return f"{_WINDOWS}{self.windows}"


Rule: TypeAlias = Reach | InWindows
"""By which rule an operator of Headgate's own keeps rows, where no name of a state says it."""

_REACH, _WINDOWS = "reach ", "windows "
_RULE = re.compile(rf"{_REACH}(any|-?\d+) to (any|-?\d+) ms|{_WINDOWS}(.+)", re.DOTALL)


def _bound(ms: int | None) -> str:
    return "any" if ms is None else str(ms)


def read_rule(text: str) -> Rule | None:
    """Return the rule that ``text`` says; None if it reads as none."""
    found = _RULE.fullmatch(text)
    if found is None:
        return None
    lower, upper, windows = found.groups()
    if windows is not None:
        return InWindows(windows)
    return Reach(None if lower == "any" else int(lower), None if upper == "any" else int(upper))


@dataclass(frozen=True, slots=True)
class DeclaredState:
    """One state. ``kind``: value, list, map, union or broadcast map; ``key_type``: of a map's own keys, else None."""

    kind: str
    name: str
    type: ValueType
    key_type: ValueType | None = None


@dataclass(frozen=True, slots=True)
class FunctionParts:
    """The states of a user's function.

    Attributes:
        keys: columns of the key as they are written, "" where no state belongs to keys.
        states: those of keys; ``lists``: those of subtasks.
        rule: of an operator of Headgate's own.
    """

    keys: str = ""
    states: tuple[DeclaredState, ...] = ()
    lists: tuple[DeclaredState, ...] = ()
    rule: Rule | None = None


@dataclass(frozen=True, slots=True)
class RecordParts:
    """Records that an operator of Headgate's own keeps.

    Attributes:
        head: all that must stay the same.
        section: what the state is called in snapshots.
        keys: names of the key's columns.
        lists: those that the user's function has beside.
    """

    head: str
    section: str
    keys: tuple[str, ...]
    columns: StructOf
    lists: tuple[DeclaredState, ...] = ()


def parts_of(identity: StateIdentity) -> FunctionParts | RecordParts | None:
    """Return the parts of a state; None: it has none that could change, or they are not clear."""
    match identity.form:
        case Form.KEYED:
            return _function_parts(identity.text)
        case Form.WINDOW_RECORDS:
            return _window_parts(identity.text)
        case Form.OTHER:
            return _function_parts(identity.text)
        case _:
            return None


def _function_parts(text: str) -> FunctionParts | None:
    keyed, lists = ("", _lists(text)) if text.startswith(_LISTS) else _beside(text)
    keys, states, rule = _keyed(keyed) if keyed else ("", (), None)
    return None if states is None or lists is None else FunctionParts(keys, states, lists, rule)


def _beside(text: str) -> tuple[str, tuple[DeclaredState, ...] | None]:
    """Return what is in front of the lists, and these."""
    own, _, lists = text.partition(f"; {_LISTS}")
    return own, _lists(_LISTS + lists) if lists else ()


def _lists(text: str) -> tuple[DeclaredState, ...] | None:
    return _declared(text.removeprefix(_LISTS).removesuffix(")").split("; "))


def _keyed(text: str) -> tuple[str, tuple[DeclaredState, ...] | None, Rule | None]:
    if not (text.startswith(Form.KEYED.value) and text.endswith(")")):
        return "", None, None
    keys, *states = text[len(Form.KEYED.value) : -1].split("; ")
    if read_columns(keys) is None:
        return "", None, None
    rule = read_rule(states[-1]) if states else None
    found = _declared([state for state in (states if rule is None else states[:-1]) if state != _TIMERS])
    return keys, found, rule


def _declared(texts: list[str]) -> tuple[DeclaredState, ...] | None:
    found = [_state(text) for text in texts]
    return None if None in found else tuple(state for state in found if state is not None)


def _state(text: str) -> DeclaredState | None:
    match = _STATE.fullmatch(text)
    if match is None:
        return None
    kind, name, types = match.groups()
    name = name_of(name)
    has_keys = kind in ("map", "broadcast map")
    outer, _, inner = types.rpartition(" -> ") if has_keys else ("", "", types)
    key_type, dtype = read_type(outer), read_type(inner)
    if dtype is None or has_keys != (key_type is not None):
        return None
    return DeclaredState(kind, name, dtype, key_type)


def _window_parts(text: str) -> RecordParts | None:
    head, _, rest = text.partition("; keys ")
    keys, *columns = rest.removesuffix(")").split("; ")
    found, kept = read_columns(keys), read_columns(", ".join(columns))
    if found is None or kept is None:
        return None
    return RecordParts(f"{head}; keys {keys}", "records", tuple(name for name, _ in found), StructOf(kept))
