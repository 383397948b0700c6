"""What is joined and how, and the operator in front of a join (docs/spec/joins.md).

Both sides come to one operator, hash-partitioned by their keys. In front of it stands an operator per side
(``JoinInputSpec``) for rows whose key is null, which never match.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.graph import MAIN, InputName, OutputTag
from headgate.model.state_schema import InWindows, Reach, Rule
from headgate.operators.base import LazyRows, Operator, Part, RowSource
from headgate.operators.changes import DELETE, INSERT, OP, OP_FIELD, UPDATE_BEFORE, Signs, signs
from headgate.operators.keys import check_keys, whole_keys
from headgate.operators.timestamps import EventTime
from headgate.operators.windows.window_assigner import AlignedWindows, ends_ms, rows_in_windows, starts_ms
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind, state_identity
from headgate.state.key_index import Slots
from headgate.state.ttl import TTL

LEFT_INPUT, RIGHT_INPUT = InputName("left"), InputName("right")


NULL_KEYS = OutputTag("null-keys")
"""Results of rows whose key is null, of a side of which unmatched rows are emitted."""


WINDOW_COLUMN = "headgate.window"
"""The column with the number of the window, which a row gets on its way into a window join."""


START_COLUMN, END_COLUMN = "window_start", "window_end"


How: TypeAlias = Literal["inner", "left", "right", "full", "semi", "anti"]


HOWS: tuple[str, ...] = get_args(How)


@dataclass(frozen=True, slots=True)
class Within:
    """Rows match whose times are near: ``lower_ms`` <= right time - left time <= ``upper_ms``."""

    lower_ms: int
    upper_ms: int


@dataclass(frozen=True, slots=True)
class SameWindow:
    """Rows match that are in the same window. A row is in several windows if they overlap.

    Attributes:
        holds_back: rows are results of other windows, which may come when a window that they lie in has ended: the
            watermark is held back by that.
    """

    windows: AlignedWindows
    holds_back: bool = False


@dataclass(frozen=True, slots=True)
class Unbounded:
    """Rows match whatever their times are; they are kept for ``ttl`` (None: for ever)."""

    ttl: TTL | None


Input: TypeAlias = Literal["records", "retractions", "upserts"]
"""What rows of a side are: new ones, or changes, with or without the rows that they take back."""


@dataclass(frozen=True, slots=True)
class Changing:
    """Rows match whatever their times are, and results are changes; rows are kept for ``ttl`` (None: for ever)."""

    ttl: TTL | None
    left: Input = "records"
    right: Input = "records"


@dataclass(frozen=True, slots=True)
class AsOf:
    """A left row matches the latest right row that is not later than it, and at most ``tolerance_ms`` earlier.

    Attributes:
        tolerance_ms: None: however early it is.
        has_changes: right rows say in their column ``op`` what they do to the row of their key.
    """

    tolerance_ms: int | None
    has_changes: bool = False


Bound: TypeAlias = Within | SameWindow | Unbounded | Changing | AsOf


@dataclass(frozen=True)
class JoinSide:
    """One input of a join: its columns, its keys, and where its event time is."""

    schema: pa.Schema
    keys: tuple[str, ...]
    time: EventTime | None


@dataclass(frozen=True)
class JoinPlan:
    """What is joined, and how.

    Attributes:
        suffix: is added to the name of a right column that a left one has as well.
    """

    left: JoinSide
    right: JoinSide
    how: str
    bound: Bound
    suffix: str

    def side(self, name: InputName) -> JoinSide:
        """Return the side of an input."""
        return self.left if name == LEFT_INPUT else self.right

    def emits_unmatched(self, name: InputName) -> bool:
        """Whether rows of a side are emitted when no partner was found."""
        return self.how in (("left", "full", "anti") if name == LEFT_INPUT else ("right", "full"))

    def op(self, name: InputName) -> str | None:
        """Return the column of a side that is about changes and no part of the results."""
        bound = self.bound
        if isinstance(bound, Changing):
            return OP if (bound.left if name == LEFT_INPUT else bound.right) != "records" else None
        return OP if isinstance(bound, AsOf) and bound.has_changes and name == RIGHT_INPUT else None

    @property
    def has_right_columns(self) -> bool:
        """Whether results have the columns of both sides."""
        return self.how not in ("semi", "anti")

    @cached_property
    def sources(self) -> list[tuple[pa.Field, str | None, str | None]]:
        """The columns of the results but for the window's bounds: each with the left and right column it comes from."""
        pairs = dict(zip(self.left.keys, self.right.keys, strict=True))
        right = pairs if self.has_right_columns else {}
        found: list[tuple[pa.Field, str | None, str | None]] = [
            (field, field.name, right.get(field.name))
            for field in self.left.schema
            if field.name != self.op(LEFT_INPUT)
        ]
        if self.has_right_columns:
            taken = set(self.left.schema.names)
            for field in self.right.schema:
                if field.name not in self.right.keys and field.name != self.op(RIGHT_INPUT):
                    name = field.name + self.suffix if field.name in taken else field.name
                    found.append((field.with_name(name), None, field.name))
        return found

    @cached_property
    def output(self) -> pa.Schema:
        """The schema of the results."""
        fields = [field for field, _, _ in self.sources]
        if isinstance(self.bound, SameWindow):
            fields += [pa.field(name, pa.timestamp("us")) for name in (START_COLUMN, END_COLUMN)]
        found = [field.with_nullable(True).remove_metadata() for field in fields]
        return pa.schema([*found, *([OP_FIELD] if isinstance(self.bound, Changing) else [])])

    @property
    def time_column(self) -> str | None:
        """Where the event time of the results is; None: they have none."""
        if isinstance(self.bound, SameWindow):
            return START_COLUMN
        if isinstance(self.bound, Unbounded | Changing) or self.how == "full":
            return None
        assert self.left.time is not None
        assert self.right.time is not None
        if self.how != "right":
            return self.left.time.column
        names: dict[str | None, str] = {right: field.name for field, _, right in self.sources}
        return names[self.right.time.column]

    @property
    def hold_back_ms(self) -> int:
        """By how much the time of a result may be earlier than the watermark at which it is emitted."""
        if not isinstance(self.bound, Within):
            return 0
        return max(-self.bound.lower_ms if self.how == "right" else self.bound.upper_ms, 0)

    def kept(self, name: InputName) -> list[str]:
        """Return the columns of a side that are kept of each row."""
        side = self.side(name)
        needed = {source for _, *sources in self.sources if (source := sources[name == RIGHT_INPUT]) is not None}
        if name == RIGHT_INPUT and self.how in ("inner", "left"):
            needed -= set(side.keys)
        if isinstance(self.bound, Within | AsOf):
            assert side.time is not None
            needed.add(side.time.column)
        if isinstance(self.bound, AsOf) and self.op(name) is not None:
            needed.add(OP)
        return [column for column in side.schema.names if column in needed] or list(side.keys[:1])

    def pairs(self, left: RowSource, right: RowSource) -> LazyRows:
        """Return results, without bounds of windows, of rows of both sides."""
        of_left = {field.name: from_left for field, from_left, _ in self.sources if from_left is not None}
        of_right = {
            field.name: from_right
            for field, _, from_right in self.sources
            if from_right is not None and field.name not in of_left
        }
        return LazyRows(self.output, [Part(of_left, left), Part(of_right, right)])

    def results(
        self, left: Mapping[str, pa.Array] | None, right: Mapping[str, pa.Array] | None, count: int
    ) -> pa.RecordBatch:
        """Return ``count`` results, without bounds of windows, from columns of both sides; None: no partner."""
        arrays = []
        for field, from_left, from_right in self.sources:
            if left is not None and from_left is not None:
                arrays.append(left[from_left])
            elif right is not None and from_right is not None:
                arrays.append(right[from_right])
            else:
                arrays.append(pa.nulls(count, field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(list(self.output)[: len(arrays)]))


def check_join(node: str, plan: JoinPlan) -> None:
    """Make sure that a join can be.

    Raises:
        UsageError: a key is unknown, cannot be one or is of another type on the other side, or two columns of the
            results have one name.
    """
    for side in (plan.left, plan.right):
        check_keys(node, side.schema, side.keys)
        if isinstance(plan.bound, SameWindow) and WINDOW_COLUMN in side.schema.names:
            raise UsageError(
                f"operator '{node}': joins have a column '{WINDOW_COLUMN}' themselves; give yours another name"
            )
    for left, right in zip(plan.left.keys, plan.right.keys, strict=True):
        types = plan.left.schema.field(left).type, plan.right.schema.field(right).type
        if not types[0].equals(types[1]):
            raise UsageError(
                f"operator '{node}': the key columns '{left}' ({types[0]}) and '{right}' ({types[1]}) have different "
                f"types; cast one of them with with_columns(...) before"
            )
    names = plan.output.names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"operator '{node}': the join would have two columns '{twice[0]}'; rename one with select(...) before, or "
            f"give another suffix="
        )


@dataclass(frozen=True)
class JoinInputSpec:
    """Prepare the rows of one side: those with a null or NaN key match nothing; the others get their window."""

    plan: JoinPlan
    input: InputName

    def build(self) -> Operator:
        return JoinInputOperator(self)

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        """Return the schemas of the prepared rows and, if there are any, of the results of rows with a null key."""
        schema = self.plan.side(self.input).schema
        if isinstance(self.plan.bound, SameWindow):
            schema = schema.append(pa.field(WINDOW_COLUMN, pa.int64()))
        found = {MAIN: schema}
        if self.plan.emits_unmatched(self.input):
            found[NULL_KEYS] = self.plan.output
        return found


class JoinInputOperator(Operator):
    """Passes on rows with whole keys."""

    def __init__(self, spec: JoinInputSpec) -> None:
        self._plan = spec.plan
        self._input = spec.input
        self._side = spec.plan.side(spec.input)

    def process(self, batch: pa.RecordBatch) -> None:
        bound = self._plan.bound
        if isinstance(bound, AsOf) and bound.has_changes and self._input == RIGHT_INPUT:
            batch = batch.filter(pc.not_equal(batch.column(OP), UPDATE_BEFORE))
        whole = whole_keys(batch, self._side.keys)
        if whole is not None:
            if self._plan.emits_unmatched(self._input):
                self._emit_unmatched(batch.filter(pa.array(~whole)))
            batch = batch.filter(pa.array(whole))
        if batch.num_rows and isinstance(self._plan.bound, SameWindow):
            batch, windows = self._in_windows(batch, self._plan.bound)
            batch = batch.append_column(WINDOW_COLUMN, pa.array(windows))
        self.output.emit(batch)

    def _in_windows(self, batch: pa.RecordBatch, bound: SameWindow) -> tuple[pa.RecordBatch, Slots]:
        """Return each row once for each of its windows, and the window."""
        time = self._side.time
        assert time is not None
        rows, windows = rows_in_windows(bound.windows, bound.windows.panes(time, time.values(batch)))
        return batch.take(pa.array(rows)) if bound.windows.is_sliding else batch, windows

    def _emit_unmatched(self, batch: pa.RecordBatch) -> None:
        bound, windows = self._plan.bound, None
        if isinstance(bound, SameWindow):
            batch, windows = self._in_windows(batch, bound)
        columns = columns_by_name(batch)
        left, right = (columns, None) if self._input == LEFT_INPUT else (None, columns)
        results = self._plan.results(left, right, batch.num_rows)
        if windows is not None:
            results = with_window(self._plan, results, windows)
        elif isinstance(bound, Changing):
            sign = np.ones(len(batch), np.int64) if self._plan.op(self._input) is None else signs(batch.column(OP))
            results = with_op(self._plan, results, sign)
        self.output.emit_to(NULL_KEYS, results)


def with_window(plan: JoinPlan, results: pa.RecordBatch, windows: Slots) -> pa.RecordBatch:
    """Return results with the bounds of their windows."""
    assert isinstance(plan.bound, SameWindow)
    times_ms = starts_ms(plan.bound.windows, windows), ends_ms(plan.bound.windows, windows)
    bounds = [pa.array(at * 1_000).view(pa.timestamp("us")) for at in times_ms]
    return pa.RecordBatch.from_arrays([*results.columns, *bounds], schema=plan.output)


def with_op(plan: JoinPlan, results: pa.RecordBatch, sign: Signs) -> pa.RecordBatch:
    """Return results as changes: inserts where the sign is 1, deletes where it is -1."""
    op = pa.array([DELETE, INSERT], OP_FIELD.type).take(pa.array((sign > 0).astype(np.int8)))
    return pa.RecordBatch.from_arrays([*results.columns, op], schema=plan.output)


Columns: TypeAlias = Mapping[str, pa.Array]


def columns_by_name(batch: pa.RecordBatch) -> Columns:
    """Return the columns of a batch by their names."""
    return dict(zip(batch.schema.names, batch.columns, strict=True))


@dataclass(frozen=True)
class JoinSpec(ABC):
    """Join the rows of two inputs. Subclasses say by which operator."""

    plan: JoinPlan

    @abstractmethod
    def build(self) -> Operator:
        """Return a live operator."""

    @property
    def output_delay_ms(self) -> int:
        """By how much ``window_start`` may be earlier than the watermark."""
        return self.plan.bound.windows.span_ms if isinstance(self.plan.bound, SameWindow) else 0

    @property
    def result_windows(self) -> AlignedWindows | None:
        """The windows of results, which have their start as event time."""
        return self.plan.bound.windows if isinstance(self.plan.bound, SameWindow) else None

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        """Return the columns of both sides.

        Raises:
            UsageError: see ``check_join``.
        """
        check_join(node, self.plan)
        return {MAIN: self.plan.output}

    @property
    def holds_back(self) -> bool:
        """Whether the watermark is held back: results of windows come after it has passed their ``window_start``."""
        bound = self.plan.bound
        return bound.holds_back if isinstance(bound, SameWindow) else isinstance(bound, Within | AsOf)

    @property
    def edge_keys(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The columns by which each side is partitioned."""
        window = (WINDOW_COLUMN,) if isinstance(self.plan.bound, SameWindow) else ()
        return self.plan.left.keys + window, self.plan.right.keys + window

    def keys_after(self, keys: tuple[str, ...] | None) -> tuple[str, ...] | None:
        is_of_left = self.plan.how not in ("right", "full") and not isinstance(self.plan.bound, SameWindow)
        return self.plan.left.keys if is_of_left else None

    @cached_property
    def keys(self) -> KeyColumns:
        """The key of the state. What the windows are is in the name of their column, and so in the state's identity."""
        names, bound = self.plan.left.keys, self.plan.bound
        types = tuple(self.plan.left.schema.field(key).type for key in names)
        if isinstance(bound, SameWindow):
            return KeyColumns((*names, bound.windows.text), (*types, pa.int64()))
        return KeyColumns(names, types)

    def rows(self, name: InputName) -> StateDescriptor | None:
        """Return the state of rows that may match again; None: those of this side match once."""
        keeps_all = self.plan.has_right_columns or isinstance(self.plan.bound, SameWindow | Changing)
        is_once = name == LEFT_INPUT and not keeps_all
        return None if is_once else self._list(name, str(name))

    def waiting(self, name: InputName) -> StateDescriptor | None:
        """Return the state of rows that have not matched yet; None: they are among the others."""
        if isinstance(self.plan.bound, SameWindow | AsOf):
            return None
        how = self.plan.how
        is_semi = name == LEFT_INPUT and how == "semi"
        if not is_semi and not self.plan.emits_unmatched(name):
            return None
        # what has matched is gone, and matters to the one, and what has not to the other
        return self._list(name, f"{name} unmatched, {how}" if how in ("semi", "anti") else f"{name} unmatched")

    def _list(self, name: InputName, state: str) -> StateDescriptor:
        schema = self.plan.side(name).schema
        dtype = pa.struct([schema.field(column) for column in self.plan.kept(name)])
        ttl = self.plan.bound.ttl if isinstance(self.plan.bound, Unbounded | Changing) else None
        return StateDescriptor(state, StateKind.LIST, dtype, ttl=ttl)

    @property
    def next_timer(self) -> StateDescriptor | None:
        """The state of the next timer of each key; None: there are none, or one time for each key."""
        is_near = isinstance(self.plan.bound, Within | AsOf)
        return StateDescriptor("next timer", StateKind.VALUE, pa.int64()) if is_near else None

    @property
    def has_timers(self) -> bool:
        """Whether rows are forgotten by event time."""
        return not isinstance(self.plan.bound, Unbounded | Changing)

    @property
    def descriptors(self) -> list[StateDescriptor]:
        """All states."""
        names = (LEFT_INPUT, RIGHT_INPUT)
        found = [*map(self.rows, names), *map(self.waiting, names), self.next_timer]
        return [one for one in found if one is not None]

    @property
    def rule(self) -> Rule | None:
        """By which times rows are kept."""
        match self.plan.bound:
            case Within(lower_ms, upper_ms):
                return Reach(lower_ms, upper_ms)
            case AsOf(tolerance_ms):
                return Reach(None if tolerance_ms is None else -tolerance_ms, 0)
            case SameWindow(windows):
                return InWindows(windows.text)
            case _:
                return None

    def state_text(self) -> str:
        return state_identity(self.keys, self.descriptors, has_timers=self.has_timers, rule=self.rule)
