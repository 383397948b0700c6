"""Running aggregation: ``key_by(...).agg(...)`` without a window, as a stream with changes (docs/spec/changes.md).

Each key has its accumulators (``window_plan``, ``state.window_aggregates``). What has to forget values, because its
input has changes, has to tell them apart (``n_unique``), or to put them in order (quantiles), keeps how often each
value is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.aggregation.aggregates import (
    Aggregate,
    Distinct,
    Ranked,
    distinct_aggregate,
    numbers_of_ranks,
    ranked_aggregate,
    ranked_results,
    text_name,
)
from headgate.operators.base import Operator, OperatorContext, Output, key_columns
from headgate.operators.changes import OP, OP_FIELD, ChangeOperator, DistinctSlots, change_rows, signs
from headgate.operators.expressions import expression_text, group_problem
from headgate.operators.keys import check_keys
from headgate.operators.schemas import batch_of, describe, empty_frame, frame_of, require_columns, schema_of_frame
from headgate.operators.windows.window_plan import (
    Decomposed,
    Input,
    InputReader,
    decomposed,
    measure_text,
    ranks,
    results,
)
from headgate.state.backend import ColumnBackend, MapColumns
from headgate.state.descriptors import StateDescriptor, StateKind, state_identity
from headgate.state.key_index import Slots
from headgate.state.ttl import TTL
from headgate.state.values import Mask
from headgate.state.window_aggregates import (
    Accumulator,
    Array,
    FrozenTable,
    Kind,
    accumulate,
    accumulated_column,
    add_values,
    started,
)

ROWS = "rows"

_FAMILY_MAX = 62
"""So many columns can share a set: each has a bit."""


@dataclass(frozen=True)
class RunningAggregateSpec:
    """Aggregate the records of each key so far, and emit how the results change. Made by ``running_aggregate_spec``.

    Attributes:
        keys: the key columns.
        schema: of the input.
        plan: the aggregates that are accumulators.
        distincts: those that count distinct values.
        ranked: those that need the values in order, or all of them to forget one.
        output: keys, aggregates in the order in which they were written, ``op``.
        has_changes: the input is a stream with changes, with retractions.
        retractions: whether the output has them.
        ttl: keys without a record for so long are forgotten.
    """

    keys: tuple[str, ...]
    schema: pa.Schema
    plan: Decomposed
    distincts: tuple[Distinct, ...]
    ranked: tuple[Ranked, ...]
    output: pa.Schema
    has_changes: bool
    retractions: bool
    ttl: TTL | None

    def build(self) -> Operator:
        return RunningAggregateOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return keys, aggregates and ``op``."""
        return self.output

    @property
    def bags(self) -> dict[int, StateDescriptor]:
        """By measure, how often each value is there: of a minimum or maximum over changes."""
        if not self.has_changes:
            return {}
        return {
            i: StateDescriptor(
                f"values_{measure_name(self.plan, i)}",
                StateKind.MAP,
                pa.int64(),
                pa.type_for_alias(measure.accumulator.dtype),
            )
            for i, measure in enumerate(self.plan.measures)
            if measure.accumulator.kind in (Kind.MIN, Kind.MAX)
        }

    @property
    def not_finite(self) -> dict[str, tuple[str, str, str]]:
        """By sum of floating numbers that change: how many NaN, inf and -inf there are, which no sum could forget."""
        if not self.has_changes:
            return {}
        names = [
            measure_name(self.plan, i)
            for i, measure in enumerate(self.plan.measures)
            if measure.accumulator.kind is Kind.ADD and measure.accumulator.dtype == "float64"
        ]
        return {name: (f"nan_{name}", f"inf_{name}", f"minus_inf_{name}") for name in names}

    @property
    def distinct_bags(self) -> list[StateDescriptor]:
        """How often each value is there of what counts distinct ones over changes, each by itself."""
        return [
            StateDescriptor(f"values_{one.state_name}", StateKind.MAP, pa.int64(), one.value_type)
            for one in self.distincts
            if self.has_changes
        ]

    @property
    def families(self) -> list[list[Distinct]]:
        """Columns that count distinct ones of the same values, under different conditions."""
        found: dict[str, list[Distinct]] = {}
        seen: set[str] = set()
        for one in self.distincts:
            if one.state_name not in seen:  # the same may be said in two ways, and has one count in state
                seen.add(one.state_name)
                found.setdefault(expression_text(one.values), []).append(one)
        return [some[i : i + _FAMILY_MAX] for some in found.values() for i in range(0, len(some), _FAMILY_MAX)]

    @property
    def sets(self) -> list[StateDescriptor]:
        """Of each family the values, and for which of its members each was there, as bits.

        Its name says which these are. Nothing is forgotten where records only come, so that no value needs a count.
        """
        if self.has_changes:
            return []
        return [
            StateDescriptor(
                f"set_{text_name(' '.join(one.state_name for one in family))}",
                StateKind.MAP,
                pa.int64(),
                family[0].value_type,
            )
            for family in self.families
        ]

    @cached_property
    def ranked_bags(self) -> list[StateDescriptor]:
        """How often each value is there, by its rank, of what is ranked."""
        return [
            StateDescriptor(f"ranked_{one.state_name}", StateKind.MAP, pa.int64(), pa.int64()) for one in self.ranked
        ]

    @cached_property
    def totals(self) -> StateDescriptor:
        """A struct of the number of records, the accumulators, and the results of what is ranked."""
        fields = [pa.field(ROWS, pa.int64())]
        for i, measure in enumerate(self.plan.measures):
            fields.append(pa.field(measure_name(self.plan, i), measure.accumulator.type))
        fields += [pa.field(name, pa.int64()) for names in self.not_finite.values() for name in names]
        fields += [pa.field(one.result_name, pa.float64()) for one in self.ranked]
        for one in self.distincts:
            fields.append(pa.field(f"distinct_{one.state_name}", pa.int64()))
            fields.append(pa.field(f"nulls_{one.state_name}", pa.int64()))
        unique = {field.name: field for field in fields}
        return StateDescriptor("totals", StateKind.VALUE, pa.struct(list(unique.values())), ttl=self.ttl)

    @property
    def descriptors(self) -> list[StateDescriptor]:
        """All states."""
        found = [self.totals, *self.bags.values(), *self.distinct_bags, *self.sets, *self.ranked_bags]
        return list({one.name: one for one in found}.values())

    def state_text(self) -> str:
        return state_identity(key_columns(self.schema, self.keys), self.descriptors)


def measure_name(plan: Decomposed, i: int) -> str:
    """Return the name of a measure in state: of its kind, and of the expression that it is about."""
    measure = plan.measures[i]
    kind = "count" if measure.given is Input.VALIDITY else measure.accumulator.kind.value
    return f"{kind}_{measure.accumulator.dtype}_{text_name(measure_text(plan, i))}"


@dataclass(frozen=True)
class RunningAggregate:
    """A running aggregation as the user wrote it."""

    keys: tuple[str, ...]
    aggregates: tuple[pl.Expr, ...]
    has_changes: bool = False
    retractions: bool = False
    ttl: TTL | None = None


def running_aggregate_spec(aggregate: RunningAggregate, schema: pa.Schema, node: str) -> RunningAggregateSpec:
    """Return the operator of a running aggregation over records of ``schema``.

    Raises:
        UsageError: unknown column, wrong type, colliding names, or an aggregate that needs all records.
    """
    check_keys(node, schema, aggregate.keys)
    if aggregate.has_changes:
        require_columns(node, schema, [OP])
        schema = pa.schema([field for field in schema if field.name != OP])
    output = _output(aggregate, schema, node)
    distincts, ranked, others = [], [], []
    for expression in aggregate.aggregates:
        distinct = distinct_aggregate(expression, schema, output)
        one = (
            ranked_aggregate(expression, schema, output, has_changes=aggregate.has_changes)
            if distinct is None
            else None
        )
        if distinct is not None:
            distincts.append(distinct)
        elif one is not None:
            ranked.append(one)
        else:
            others.append(expression)
    plan = decomposed(others, output, schema)
    if isinstance(plan, pl.Expr):
        raise UsageError(
            f"operator '{node}': {plan} cannot be kept up to date record by record; len, count, sum, mean, std, var, "
            "median and quantile of an expression over one record can, where it is an integer, a float or a boolean, "
            "and so can sum and mean of decimals, min and max of these (of decimals of at most 18 digits) and of "
            "times, and n_unique, first, last, sort_by(...).last(), max_by and min_by also of texts; cast others, use "
            "window(...).agg(...), or keep state in a headgate.BatchProcessFunction"
        )
    if aggregate.has_changes and any(measure.accumulator.is_ordered for measure in plan.measures):
        raise UsageError(
            f"operator '{node}': first, last and picks by another column do not go with changes, because the record "
            "before is not known when the picked one is taken back; use top(1, by=...)"
        )
    for name, why in (("changes", aggregate.has_changes), ("retractions=True", aggregate.retractions)):
        if aggregate.ttl is not None and why:
            raise UsageError(
                f"operator '{node}': ttl= does not go with {name}: what a forgotten key sent could not be taken back"
            )
    if aggregate.ttl is not None and (distincts or ranked):
        raise UsageError(
            f"operator '{node}': ttl= does not go with n_unique, median or quantile; key by the day, or use a window"
        )
    return RunningAggregateSpec(
        aggregate.keys,
        schema,
        plan,
        tuple(distincts),
        tuple(ranked),
        output,
        aggregate.has_changes,
        aggregate.retractions,
        aggregate.ttl,
    )


def _output(aggregate: RunningAggregate, schema: pa.Schema, node: str) -> pa.Schema:
    for expression in aggregate.aggregates:
        problem = group_problem(expression)
        if problem:
            raise UsageError(f"operator '{node}': the expression {expression} {problem}")
    try:
        frame = empty_frame(schema).group_by(*aggregate.keys).agg(*aggregate.aggregates)
    except (pl.exceptions.PolarsError, TypeError) as error:
        first = str(error).strip().split("\n", 1)[0]
        raise UsageError(f"operator '{node}': {first}; the columns are {describe(schema)}") from error
    output = schema_of_frame(frame).append(OP_FIELD)
    if len(set(output.names)) != len(output.names):
        raise UsageError(
            f"operator '{node}': two result columns have the same name ('op' is that of the changes); they would be "
            f"{describe(output)}"
        )
    return output


@dataclass(slots=True)
class _Totals:
    """Accumulators of some keys: ``rows``, and by name in state the values, with which are there."""

    rows: Array
    values: dict[str, Array]
    seen: dict[str, npt.NDArray[np.bool_]]

    def copy(self) -> _Totals:
        return _Totals(
            self.rows.copy(),
            {name: values.copy() for name, values in self.values.items()},
            {name: seen.copy() for name, seen in self.seen.items()},
        )


class RunningAggregateOperator(ChangeOperator):
    """Adds each batch to the accumulators of its keys, and emits what changed."""

    _backend: ColumnBackend

    def __init__(self, spec: RunningAggregateSpec) -> None:
        self._spec = spec
        self._plan = spec.plan
        self._names = [measure_name(spec.plan, i) for i in range(len(spec.plan.measures))]
        self._accumulators = {
            name: measure.accumulator for name, measure in zip(self._names, spec.plan.measures, strict=True)
        }
        self._counts = [one.state_name for one in spec.distincts]
        for name in self._counts:
            self._accumulators[f"distinct_{name}"] = self._accumulators[f"nulls_{name}"] = Accumulator(
                Kind.ADD, "int64"
            )
        self._not_finite = spec.not_finite
        for names in self._not_finite.values():
            self._accumulators |= dict.fromkeys(names, Accumulator(Kind.ADD, "int64"))
        for one in spec.ranked:
            self._accumulators[one.result_name] = Accumulator(Kind.MAX, "float64")
        self._measures_only = set(self._names) - {self._names[i] for one in spec.plan.results for i in one.measures}
        """Measures of which no result is made: a mean, a rank."""
        self._reader = InputReader(spec.plan)
        self._distinct = DistinctSlots()

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        spec = self._spec
        self._backend = context.states.by_column(key_columns(spec.schema, spec.keys), spec.descriptors)
        self._state = self._backend.values(spec.totals)
        self._bags = {i: self._backend.maps(one) for i, one in spec.bags.items()}
        self._distinct_bags = [self._backend.maps(one) for one in spec.distinct_bags]
        self._sets = [(family, self._backend.maps(one)) for family, one in zip(spec.families, spec.sets, strict=False)]
        self._ranked_bags = [self._backend.maps(one) for one in spec.ranked_bags]

    def process(self, batch: pa.RecordBatch) -> None:
        self._begin_call()
        self._backend.prepare()
        slots, of_row = self._distinct.of(self._backend.slots([batch.column(key) for key in self._spec.keys]))
        before = self._load(slots)
        # both are needed: only results that changed are emitted
        after = before.copy()
        change = signs(batch.column(OP)) if self._spec.has_changes else None
        self._add(after, slots, of_row, batch, change)
        had, has = before.rows > 0, after.rows > 0
        self._store(slots, had, has, after)
        old, new = self._results(before), self._results(after)
        rows, codes = change_rows(had, has, self._differs(before, after), retractions=self._spec.retractions)
        # old results, then new ones: ``rows`` chooses among both, and either has the place of its key
        both = [pa.concat_arrays([a, b]).take(pa.array(rows)) for a, b in zip(old, new, strict=True)]
        keys = self._backend.key_columns(slots[rows % max(len(slots), 1)])
        self._emit(self._spec.output, [*keys, *both], codes)

    def _load(self, slots: Slots) -> _Totals:
        has = self._state.contains(slots)
        found = self._state.get(slots[has])
        rows = np.zeros(len(slots), np.int64)
        rows[has] = found.field(ROWS).to_numpy(zero_copy_only=False)
        totals = _Totals(rows, {}, {})
        for name, accumulator in self._accumulators.items():
            values = started(accumulator, len(slots))
            column = found.field(name)
            if not accumulator.can_be_null:
                values[has] = column.to_numpy(zero_copy_only=False)
            else:
                valid = column.is_valid().to_numpy(zero_copy_only=False)
                seen = has.copy()
                seen[has] = valid
                values[seen] = column.drop_null().to_numpy(zero_copy_only=False)
                totals.seen[name] = seen
            totals.values[name] = values
        return totals

    def _store(self, slots: Slots, had: npt.NDArray[np.bool_], has: npt.NDArray[np.bool_], totals: _Totals) -> None:
        if (had & ~has).any():
            self._state.clear(slots[had & ~has])
        dtype = self._spec.totals.type
        arrays = [pa.array(totals.rows[has])]
        for field in list(dtype)[1:]:
            seen = totals.seen.get(field.name)
            arrays.append(accumulated_column(totals.values[field.name][has], None if seen is None else seen[has]))
        self._state.put(slots[has], pa.StructArray.from_arrays(arrays, fields=list(dtype)))

    def _add(
        self,
        totals: _Totals,
        slots: Slots,
        of_row: Slots,
        batch: pa.RecordBatch,
        change: npt.NDArray[np.int64] | None,
    ) -> None:
        inputs = self._reader.read(batch)
        if change is None:
            values, seen = [totals.values[name] for name in self._names], [totals.seen.get(n) for n in self._names]
            accumulators = [measure.accumulator for measure in self._plan.measures]
            accumulate(accumulators, FrozenTable(totals.rows, values, seen), of_row, 1, inputs)
        else:
            np.add.at(totals.rows, of_row, change)
            if (totals.rows < 0).any():
                raise self._unknown_row()
            for i, given in enumerate(inputs):
                where, one, change_of = of_row, given.values, change
                if given.valid is not None:
                    where, change_of = of_row[given.valid], change[given.valid]
                    one = one if isinstance(one, int) else one[given.valid]
                self._change(i, totals, slots, where, one, change_of)
        if change is not None:
            self._count_distinct(totals, slots, of_row, batch, change)
        elif self._sets:
            self._add_to_sets(totals, slots, of_row, frame_of(batch))
        if self._spec.ranked:
            self._rank(totals, slots, of_row, batch, change)

    def _change(
        self,
        i: int,
        totals: _Totals,
        slots: Slots,
        where: Slots,
        values: Array | int,
        change: npt.NDArray[np.int64],
    ) -> None:
        """Add values that come to an accumulator, and take those back that go."""
        name = self._names[i]
        accumulator, target = self._accumulators[name], totals.values[name]
        if accumulator.kind is Kind.ADD:
            if name in self._not_finite:
                assert not isinstance(values, int)
                for one, found in zip(self._not_finite[name], _not_finite(values), strict=True):
                    np.add.at(totals.values[one], where[found], change[found])
                finite = np.isfinite(values)
                where, values, change = where[finite], values[finite], change[finite]
            add_values(target, where, values, change)
            return
        assert not isinstance(values, int)
        seen = totals.seen[name]
        bag, combine = self._bags[i], np.fmin if accumulator.kind is Kind.MIN else np.fmax  # NaN if there is no other
        places, column, _, counts = self._counted(bag, slots, where, pa.array(values), change)
        found = column.to_numpy(zero_copy_only=False)
        # the smallest or largest value was taken back for the last time: see which is that now
        lost = (counts == 0) & seen[places] & ((found == target[places]) | (target[places] != target[places]))
        again = np.unique(places[lost])
        target[again], seen[again] = accumulator.start, False
        there = counts > 0
        combine.at(target, places[there], found[there])
        seen[places[there]] = True
        if len(again):
            rows, map_keys, _ = bag.items(slots[again])
            combine.at(target, again[rows], map_keys.to_numpy(zero_copy_only=False))
            seen[again[rows]] = True

    def _counted(
        self, bag: MapColumns, slots: Slots, where: Slots, values: pa.Array, change: npt.NDArray[np.int64] | None
    ) -> tuple[Slots, pa.Array, Array, Array]:
        """Count values in a bag.

        Returns:
            Of each key and value that was given: the key's place, the value, and the counts before and after.
        """
        data = {"place": where, "change": np.ones(len(where), np.int64) if change is None else change}
        frame = pl.DataFrame(data).with_columns(pl.Series("value", values))
        net = frame.group_by("place", "value", maintain_order=True).agg(pl.col("change").sum())
        places = net["place"].to_numpy()
        column = batch_of(net.select("value"), pa.schema([pa.field("value", values.type)])).column(0)
        before = bag.get(slots[places], column).fill_null(0).to_numpy(zero_copy_only=False)
        after = before + net["change"].to_numpy()
        if (after < 0).any():
            raise self._unknown_row()
        kept, gone = after > 0, (after == 0) & (before > 0)
        if kept.any():
            bag.put(slots[places[kept]], column.filter(pa.array(kept)), pa.array(after[kept]))
        if gone.any():
            bag.remove(slots[places[gone]], column.filter(pa.array(gone)))
        return places, column, before, after

    def _count_distinct(
        self,
        totals: _Totals,
        slots: Slots,
        of_row: Slots,
        batch: pa.RecordBatch,
        change: npt.NDArray[np.int64],
    ) -> None:
        frame = frame_of(batch)
        done: set[str] = set()
        for one, name, bag in zip(self._spec.distincts, self._counts, self._distinct_bags, strict=True):
            if name in done:
                continue
            done.add(name)
            column = batch_of(frame.select(one.inner.alias("x")), pa.schema([pa.field("x", one.value_type)])).column(0)
            where, change_of = of_row, change
            if column.null_count:
                valid = column.is_valid().to_numpy(zero_copy_only=False)
                np.add.at(totals.values[f"nulls_{name}"], of_row[~valid], change[~valid])
                where, column, change_of = of_row[valid], column.drop_null(), change[valid]
            places, _, before, after = self._counted(bag, slots, where, column, change_of)
            np.add.at(
                totals.values[f"distinct_{name}"], places, (after > 0).astype(np.int64) - (before > 0).astype(np.int64)
            )

    def _add_to_sets(self, totals: _Totals, slots: Slots, of_row: Slots, frame: pl.DataFrame) -> None:
        """Count values that were not there before."""
        for family, values in self._sets:
            bits: pl.Expr = pl.lit(0, pl.Int64)
            for i, one in enumerate(family):
                there = pl.lit(True) if one.condition is None else one.condition.fill_null(False)
                bits = bits | pl.when(there).then(pl.lit(1 << i, pl.Int64)).otherwise(pl.lit(0, pl.Int64))
            given = frame.select(family[0].values.alias("value"), bits.alias("bits"))
            is_value = pl.col("value").is_not_null()
            given = given.select("value", bits=pl.when(is_value).then("bits").otherwise(0), place=pl.Series(of_row))
            bits_of_rows = given["bits"].to_numpy()
            for i, one in enumerate(family):
                without = of_row[bits_of_rows >> i & 1 == 0]
                if len(without):
                    totals.values[f"nulls_{one.state_name}"] += np.bincount(without, minlength=len(slots))
            given = given.filter(pl.col("bits") != 0)
            given = given.group_by("place", "value", maintain_order=True).agg(pl.col("bits").bitwise_or())
            places = given["place"].to_numpy()
            schema = pa.schema([pa.field("value", family[0].value_type)])
            column = batch_of(given.select("value"), schema).column(0)
            before = values.get(slots[places], column).fill_null(0).to_numpy(zero_copy_only=False)
            after = before | given["bits"].to_numpy()
            is_new = after != before
            places, added, after = places[is_new], after[is_new] & ~before[is_new], after[is_new]
            if len(places) == 0:
                continue
            values.put(slots[places], column.filter(pa.array(is_new)), pa.array(after))
            for i, one in enumerate(family):
                counts = totals.values[f"distinct_{one.state_name}"]
                counts += np.bincount(places[added >> i & 1 == 1], minlength=len(slots))

    def _rank(
        self,
        totals: _Totals,
        slots: Slots,
        of_row: Slots,
        batch: pa.RecordBatch,
        change: npt.NDArray[np.int64] | None,
    ) -> None:
        """Count the values of what is ranked, and compute it again for the keys that have others."""
        frame = frame_of(batch)
        counted: dict[str, Slots] = {}
        for one, bag, state in zip(self._spec.ranked, self._ranked_bags, self._spec.ranked_bags, strict=True):
            if state.name not in counted:
                schema = pa.schema([pa.field("x", one.value_type)])
                column = batch_of(frame.select(one.inner.alias("x")), schema).column(0)
                valid = column.is_valid().to_numpy(zero_copy_only=False)
                given = pa.array(ranks(column)[valid])
                change_of = None if change is None else change[valid]
                counted[state.name] = np.unique(self._counted(bag, slots, of_row[valid], given, change_of)[0])
            places = counted[state.name]
            of, map_keys, counts = bag.items(slots[places])
            values = numbers_of_ranks(map_keys.to_numpy(zero_copy_only=False), one.value_type)
            found, is_there = ranked_results(
                one.found, len(places), of, values, counts.to_numpy(zero_copy_only=False).astype(np.int64)
            )
            totals.values[one.result_name][places] = np.where(is_there, found, np.nan)
            totals.seen[one.result_name][places] = is_there

    def _unknown_row(self) -> UsageError:
        return UsageError(
            f"operator '{self.context.node}': a change takes back a row that did not come before; its input is said to "
            "have retractions, so each row that goes must equal one that came"
        )

    def _differs(self, before: _Totals, after: _Totals) -> npt.NDArray[np.bool_]:
        """Return which keys may have another result."""
        has_len = any(result.aggregate is Aggregate.LEN for result in self._plan.results)
        found = before.rows != after.rows if has_len else np.zeros(len(before.rows), np.bool_)
        for name, old in before.values.items():
            if name in self._measures_only:
                continue
            new = after.values[name]
            if name.startswith("nulls_"):
                old, new = old > 0, new > 0
            found |= (old != new) if old.dtype != np.float64 else (old != new) & ~(np.isnan(old) & np.isnan(new))
        for name, seen in before.seen.items():
            if name not in self._measures_only:
                found |= seen != after.seen[name]
        return found

    def _measured(self, totals: _Totals, name: str) -> Array:
        values = totals.values[name]
        if name not in self._not_finite:
            return values
        nan, inf, minus_inf = (totals.values[one] > 0 for one in self._not_finite[name])
        values = np.where(inf, np.inf, np.where(minus_inf, -np.inf, values))
        return np.where(nan | (inf & minus_inf), np.nan, values)

    def _results(self, totals: _Totals) -> list[pa.Array]:
        measured = tuple(self._measured(totals, name) for name in self._names)
        table = FrozenTable(totals.rows, measured, tuple(totals.seen.get(name) for name in self._names))
        names = [result.name for result in self._plan.results]
        found = dict(zip(names, results(self._plan, table), strict=True))
        for one, name in zip(self._spec.distincts, self._counts, strict=True):
            count = totals.values[f"distinct_{name}"]
            if one.has_nulls:
                count = count + (totals.values[f"nulls_{name}"] > 0)
            found[one.name] = pa.array(count).cast(one.dtype)
        for ranked in self._spec.ranked:
            values, seen = totals.values[ranked.result_name], totals.seen[ranked.result_name]
            found[ranked.name] = accumulated_column(values, seen).cast(ranked.dtype)
        columns: Sequence[str] = self._spec.output.names[len(self._spec.keys) : -1]
        return [found[name] for name in columns]


def _not_finite(values: Array) -> tuple[Mask, Mask, Mask]:
    """Return which numbers are NaN, which inf and which -inf."""
    return np.isnan(values), np.isposinf(values), np.isneginf(values)


def needed_columns(aggregates: Sequence[pl.Expr], schema: pa.Schema, others: Sequence[str]) -> list[str]:
    """Return the columns of ``schema`` that aggregates need, and ``others`` that are among them."""
    needed = {*others, *(name for expression in aggregates for name in expression.meta.root_names())}
    return [name for name in schema.names if name in needed]
