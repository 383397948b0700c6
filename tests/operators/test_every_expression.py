"""Every method of Polars' expressions is allowed or refused, and what is allowed does not depend on batches.

A method that a new Polars has appears here by itself: it is tried without arguments, or fails until it has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from functools import partial
from typing import Any

import polars as pl
import pytest

from headgate.errors import UsageError
from headgate.operators.expressions import elementwise_problem, group_problem, select_spec
from headgate.operators.schemas import canonical_schema
from headgate.operators.windows.window_assigner import tumbling
from headgate.operators.windows.window_plan import WindowedAggregate, window_shape

i, f, s, b = pl.col("i"), pl.col("f"), pl.col("s"), pl.col("b")
d, day, span, clock = pl.col("d"), pl.col("day"), pl.col("span"), pl.col("clock")
numbers, texts, bools, pair, both, raw = (pl.col(n) for n in ("numbers", "texts", "bools", "pair", "both", "raw"))
entries = pl.concat_list(pl.struct(key="iso", value="i"))
enum = s.cast(pl.Enum(["a", "b", "c", "2026-01-02", "[1]"]))

PROBE = pl.DataFrame(
    {
        "i": [3, 1, 2, None, 3, 1],
        "f": [0.5, -1.5, 3.0, float("nan"), None, 0.25],
        "s": ["b", "a", None, "c", "a", "b"],
        "b": [True, False, None, True, True, False],
        "d": [datetime(2026, 1, 1, hour) for hour in (3, 1, 2, 2, 5, 4)],
        "day": [date(2026, 1, n) for n in (5, 6, 7, 8, 12, 9)],
        "span": [timedelta(hours=n) for n in (3, 1, 2, 2, 5, 4)],
        "clock": [datetime(2026, 1, 1, hour).time() for hour in (3, 1, 2, 2, 5, 4)],
        "numbers": [[3, 1, 2], [1], [], None, [2, 2], [5, None]],
        "texts": [["b", "a"], ["a"], [], None, ["c", "c"], ["x", None]],
        "bools": [[True, False], [True], [], None, [False], [None, True]],
        "pair": [[2, 1], [3, 4], [5, 6], None, [0, 0], [1, None]],
        "both": [{"x": n, "y": str(n)} for n in (3, 1, 2, 2, 5, 4)],
        "raw": [b"abcd", b"bcde", None, b"abcd", b"wxyz", b"zzzz"],
        "iso": ["2026-01-02", "2026-02-03", "2026-03-04", "2026-04-05", "2026-05-06", "2026-06-07"],
        "at": ["03:04:05", "04:05:06", "05:06:07", "06:07:08", "07:08:09", "08:09:10"],
        "json": ['{"x": 1}', '{"x": 2}', '{"x": 3}', None, '{"x": 4}', '{"x": 5}'],
        "digits": ["1", "2", "3", None, "4", "5"],
    },
    schema_overrides={"pair": pl.Array(pl.Int64, 2), "i": pl.Int64},
)

ONLY_SERIES = pl.Series([2, 1])

Example = Callable[[], Any]

OF_EXPRESSIONS: dict[str, Example] = {
    "add": lambda: i.add(1),
    "alias": lambda: i.alias("x"),
    "all": lambda: b.all(),
    "and_": lambda: b.and_(b),
    "any": lambda: b.any(),
    "append": lambda: i.append(i),
    "approx_quantile": lambda: f.approx_quantile(0.5),
    "bin_intervals": lambda: f.bin_intervals([0.0], labels=["x", "y"]),
    "bin_quantiles": lambda: f.bin_quantiles([0.5], labels=["x", "y"]),
    "bin_ranges": lambda: f.bin_ranges([0.0]),
    "bin_ranks": lambda: f.bin_ranks(2, labels=["x", "y"]),
    "bottom_k_by": lambda: i.bottom_k_by("f"),
    "cast": lambda: i.cast(pl.String),
    "clip": lambda: i.clip(1, 2),
    "cumulative_eval": lambda: i.cumulative_eval(pl.element().sum()),
    "cut": lambda: f.cut([0.0]),
    "dot": lambda: f.dot("f"),
    "item": lambda: i.item(),
    "eq": lambda: i.eq(1),
    "eq_missing": lambda: i.eq_missing(1),
    "ewm_mean": lambda: f.ewm_mean(com=1),
    "ewm_mean_by": lambda: f.ewm_mean_by("d", half_life="1h"),
    "ewm_std": lambda: f.ewm_std(com=1),
    "ewm_sum": lambda: f.ewm_sum(com=1),
    "ewm_sum_by": lambda: f.ewm_sum_by("d", half_life="1h"),
    "ewm_var": lambda: f.ewm_var(com=1),
    "exclude": lambda: pl.all().exclude("i"),
    "explode": lambda: numbers.explode(),
    "extend_constant": lambda: i.extend_constant(1, 1),
    "fill_nan": lambda: f.fill_nan(0.0),
    "fill_null": lambda: i.fill_null(0),
    "filter": lambda: i.filter(b),
    "floordiv": lambda: i.floordiv(2),
    "gather": lambda: i.gather([0]),
    "gather_every": lambda: i.gather_every(2),
    "ge": lambda: i.ge(1),
    "get": lambda: i.get(0),
    "gt": lambda: i.gt(1),
    "index_of": lambda: i.index_of(1),
    "interpolate_by": lambda: f.interpolate_by("d"),
    "is_between": lambda: i.is_between(1, 2),
    "is_close": lambda: f.is_close(0.5),
    "is_in": lambda: i.is_in([1, 2]),
    "le": lambda: i.le(1),
    "log": lambda: f.log(),
    "lt": lambda: i.lt(1),
    "max_by": lambda: i.max_by("f"),
    "min_by": lambda: i.min_by("f"),
    "mod": lambda: i.mod(2),
    "mul": lambda: i.mul(2),
    "ne": lambda: i.ne(1),
    "ne_missing": lambda: i.ne_missing(1),
    "not_": lambda: b.not_(),
    "or_": lambda: b.or_(b),
    "over": lambda: i.sum().over("s"),
    "pow": lambda: i.pow(2),
    "qcut": lambda: f.qcut(2),
    "quantile": lambda: f.quantile(0.5),
    "reinterpret": lambda: i.reinterpret(signed=False),
    "repeat_by": lambda: s.repeat_by(2),
    "replace": lambda: i.replace({1: 2}),
    "replace_strict": lambda: i.replace_strict({1: 2}, default=0),
    "reshape": lambda: i.reshape((2, 3)),
    "rolling": lambda: i.sum().rolling("d", period="1h"),
    "round_sig_figs": lambda: f.round_sig_figs(2),
    "sample": lambda: i.sample(fraction=1.0, shuffle=True),
    "search_sorted": lambda: i.search_sorted(1),
    "slice": lambda: i.slice(1),
    "sort_by": lambda: i.sort_by("f"),
    "sub": lambda: i.sub(1),
    "top_k_by": lambda: i.top_k_by("f"),
    "truediv": lambda: i.truediv(2),
    "truncdiv": lambda: i.truncdiv(2),
    "xor": lambda: b.xor(b),
    "struct": lambda: both.struct.field("x"),
    "map_elements": lambda: i.map_elements(abs, return_dtype=pl.Int64),
    "map_batches": lambda: i.map_batches(lambda x: x, return_dtype=pl.Int64),
    "map": lambda: i.map_batches(lambda x: x, return_dtype=pl.Int64, is_elementwise=True),
    "rolling_map": lambda: i.rolling_map(len, 2),
    "inspect": lambda: i.inspect(),
    "pipe": lambda: i.pipe(lambda e: e + 1),
    "pipe_with_dtype": lambda: i.pipe_with_dtype(lambda e, t: e + 1),
    "deserialize": lambda: pl.Expr.deserialize(i.meta.serialize()),
    "is_empty": lambda: i.is_empty(),
    **{
        name: (lambda name=name: getattr(f, name)(2))
        for name in dir(f)
        if name.startswith("rolling_") and not name.endswith(("_by", "_map", "_quantile"))
    },
    **{
        name: (lambda name=name: getattr(f, name)("d", window_size="2h"))
        for name in dir(f)
        if name.startswith("rolling_") and name.endswith("_by") and name != "rolling_quantile_by"
    },
    "rolling_quantile": lambda: f.rolling_quantile(0.5, window_size=2),
    "rolling_quantile_by": lambda: f.rolling_quantile_by("d", window_size="2h", quantile=0.5),
}

OF_STR: dict[str, Example] = {
    "contains": lambda: s.str.contains("a"),
    "contains_any": lambda: s.str.contains_any(["a"]),
    "count_matches": lambda: s.str.count_matches("a"),
    "decode": lambda: pl.lit("YQ==").str.decode("base64"),
    "encode": lambda: s.str.encode("hex"),
    "ends_with": lambda: s.str.ends_with("a"),
    "extract": lambda: s.str.extract("(a)"),
    "extract_all": lambda: s.str.extract_all("a"),
    "extract_groups": lambda: s.str.extract_groups("(a)"),
    "extract_many": lambda: s.str.extract_many(["a"]),
    "find": lambda: s.str.find("a"),
    "find_many": lambda: s.str.find_many(["a"]),
    "head": lambda: s.str.head(1),
    "json_decode": lambda: pl.col("json").str.json_decode(pl.Struct({"x": pl.Int64})),
    "json_path_match": lambda: pl.col("json").str.json_path_match("$.x"),
    "pad_end": lambda: s.str.pad_end(3),
    "pad_start": lambda: s.str.pad_start(3),
    "replace": lambda: s.str.replace("a", "b"),
    "replace_all": lambda: s.str.replace_all("a", "b"),
    "replace_many": lambda: s.str.replace_many({"a": "b"}),
    "slice": lambda: s.str.slice(0, 1),
    "split": lambda: s.str.split("a"),
    "split_exact": lambda: s.str.split_exact("a", 1),
    "splitn": lambda: s.str.splitn("a", 2),
    "starts_with": lambda: s.str.starts_with("a"),
    "strip_prefix": lambda: s.str.strip_prefix("a"),
    "strip_suffix": lambda: s.str.strip_suffix("a"),
    "strptime": lambda: pl.col("iso").str.strptime(pl.Date, "%Y-%m-%d"),
    "tail": lambda: s.str.tail(1),
    "to_date": lambda: pl.col("iso").str.to_date("%Y-%m-%d"),
    "to_time": lambda: pl.col("at").str.to_time("%H:%M:%S"),
    "to_datetime": lambda: pl.col("iso").str.to_datetime("%Y-%m-%d"),
    "to_decimal": lambda: pl.col("digits").str.to_decimal(scale=2),
    "to_integer": lambda: pl.col("digits").str.to_integer(),
    "zfill": lambda: s.str.zfill(3),
}

OF_DT: dict[str, Example] = {
    "add_business_days": lambda: day.dt.add_business_days(1, roll="forward"),
    "base_utc_offset": lambda: d.dt.replace_time_zone("UTC").dt.base_utc_offset(),
    "cast_time_unit": lambda: d.dt.cast_time_unit("ms"),
    "combine": lambda: day.dt.combine(clock),
    "convert_time_zone": lambda: d.dt.replace_time_zone("UTC").dt.convert_time_zone("Asia/Tokyo"),
    "dst_offset": lambda: d.dt.replace_time_zone("UTC").dt.dst_offset(),
    "is_business_day": lambda: day.dt.is_business_day(),
    "offset_by": lambda: d.dt.offset_by("1h"),
    "replace": lambda: d.dt.replace(year=2025),
    "replace_time_zone": lambda: d.dt.replace_time_zone("UTC"),
    "round": lambda: d.dt.round("2h"),
    "strftime": lambda: d.dt.strftime("%H"),
    "to_string": lambda: d.dt.to_string("%H"),
    "truncate": lambda: d.dt.truncate("2h"),
    **{name: (lambda name=name: getattr(span.dt, name)()) for name in dir(span.dt) if name.startswith("total_")},
}

OF_LISTS: dict[str, Callable[[Any], Any]] = {
    "agg": lambda c: c.agg(pl.element().sum()),
    "contains": lambda c: c.contains(1),
    "count_matches": lambda c: c.count_matches(1),
    "eval": lambda c: c.eval(pl.element().rank()),
    "get": lambda c: c.get(0, null_on_oob=True),
    "to_map": lambda c: entries.list.to_map(),
    "shift": lambda c: c.shift(1),
    "slice": lambda c: c.slice(0, 1),
    "gather_every": lambda c: c.gather_every(2),
    "dot": lambda c: c.dot(pair),
    "concat": lambda c: c.concat(numbers),
    "filter": lambda c: c.filter(pl.element() > 1),
    "gather": lambda c: c.gather([0], null_on_oob=True),
    "sample": lambda c: c.sample(1, seed=1),
    "set_difference": lambda c: c.set_difference([1]),
    "set_intersection": lambda c: c.set_intersection([1]),
    "set_symmetric_difference": lambda c: c.set_symmetric_difference([1]),
    "set_union": lambda c: c.set_union([1]),
    "to_array": lambda c: c.head(0).list.to_array(0),
    "to_struct": lambda c: c.to_struct(fields=["x", "y"]),
    "join": lambda c: c.join("-"),
    "item": lambda c: c.head(1).list.item(allow_empty=True),
}

OTHERS: dict[str, dict[str, Example]] = {
    "struct": {
        "drop": lambda: both.struct.drop(["x"]),
        "eval": lambda: both.struct.eval(pl.field("x") + 1),
        "field": lambda: both.struct.field("x"),
        "rename_fields": lambda: both.struct.rename_fields(["a", "c"]),
        "with_fields": lambda: both.struct.with_fields(pl.field("x") + 1),
    },
    "bin": {
        "contains": lambda: raw.bin.contains(b"a"),
        "decode": lambda: pl.lit(b"6161").bin.decode("hex"),
        "encode": lambda: raw.bin.encode("hex"),
        "ends_with": lambda: raw.bin.ends_with(b"a"),
        "get": lambda: raw.bin.get(0),
        "reinterpret": lambda: raw.bin.reinterpret(dtype=pl.Int32),
        "slice": lambda: raw.bin.slice(0, 1),
        "starts_with": lambda: raw.bin.starts_with(b"a"),
    },
    "cat": {
        "ends_with": lambda: enum.cat.ends_with("a"),
        "slice": lambda: enum.cat.slice(0, 1),
        "starts_with": lambda: enum.cat.starts_with("a"),
        "to": lambda: enum.cat.physical().cat.to(enum_type()),
    },
    "name": {
        "map": lambda: i.name.map(str.upper),
        "map_fields": lambda: both.name.map_fields(str.upper),
        "prefix": lambda: i.name.prefix("x"),
        "prefix_fields": lambda: both.name.prefix_fields("x"),
        "replace": lambda: i.name.replace("i", "x"),
        "strip_prefix": lambda: span.name.strip_prefix("s"),
        "strip_suffix": lambda: span.name.strip_suffix("n"),
        "suffix": lambda: i.name.suffix("x"),
        "suffix_fields": lambda: both.name.suffix_fields("x"),
    },
    "ext": {"to": lambda: i, "storage": lambda: i},
}


def of_lists(space: str, name: str) -> Any:
    column = {"any": bools, "all": bools, "join": texts}.get(name, COLUMNS[space])
    if space == "arr" and column is not pair:
        column = column.list.head(0).list.to_array(0)
    on = getattr(column, space)
    return OF_LISTS[name](on) if name in OF_LISTS else getattr(on, name)()


def enum_type() -> pl.Enum:
    return pl.Enum(["a", "b", "c", "2026-01-02", "[1]"])


COLUMNS = {"str": s, "dt": d, "list": numbers, "arr": pair, "struct": both, "bin": raw, "cat": enum, "name": i}


def examples() -> Iterator[tuple[str, Any]]:
    """Yield every method of expressions with a call of it: an example above, or one without arguments."""
    spaces = {"str", "dt", "list", "arr", "struct", "bin", "cat", "name", "ext", "meta"}
    for name in dir(i):
        if not name.startswith("_") and name not in spaces - {"struct"}:
            yield name, OF_EXPRESSIONS.get(name)
    for space in spaces - {"meta"}:
        for name in dir(getattr(i, space)):
            if name.startswith("_"):
                continue
            if space in ("list", "arr"):
                yield f"{space}.{name}", partial(of_lists, space, name)
            else:
                of = {"str": OF_STR, "dt": OF_DT, **OTHERS}[space]
                yield f"{space}.{name}", of.get(name)


REFUSED = [
    "all", "any", "append", "approx_n_unique", "approx_quantile", "arg_max", "arg_min", "arg_sort",
    "arg_true", "arg_unique", "arr.explode", "backward_fill", "bin_quantiles", "bin_ranks", "bitwise_and",
    "bitwise_or", "bitwise_xor", "bottom_k", "bottom_k_by", "count", "cum_count", "cum_max", "cum_min",
    "cum_prod", "cum_sum", "cumulative_eval", "diff", "dot", "drop_nans", "drop_nulls", "entropy",
    "ewm_mean", "ewm_mean_by", "ewm_std", "ewm_sum", "ewm_sum_by", "ewm_var", "explode", "extend_constant",
    "filter", "first", "forward_fill", "gather", "gather_every", "get", "has_nulls", "head", "hist",
    "implode", "index_of", "inspect", "interpolate", "interpolate_by", "is_duplicated", "is_empty",
    "is_first_distinct", "is_last_distinct", "is_sorted", "is_unique", "item", "kurtosis", "last", "len",
    "limit", "list.explode", "list.sample", "map", "map_batches", "map_elements", "max", "max_by", "mean",
    "median", "min", "min_by", "mode", "n_unique", "name.strip_prefix", "name.strip_suffix", "nan_max",
    "nan_min", "null_count", "over", "pct_change", "peak_max", "peak_min", "pipe_with_dtype", "product",
    "qcut", "quantile", "rank", "reshape", "reverse", "rle", "rle_id", "rolling", "rolling_kurtosis",
    "rolling_map", "rolling_max", "rolling_max_by", "rolling_mean", "rolling_mean_by", "rolling_median",
    "rolling_median_by", "rolling_min", "rolling_min_by", "rolling_quantile", "rolling_quantile_by",
    "rolling_rank", "rolling_rank_by", "rolling_skew", "rolling_std", "rolling_std_by", "rolling_sum",
    "rolling_sum_by", "rolling_var", "rolling_var_by", "sample", "search_sorted", "set_sorted", "shift",
    "shuffle", "skew", "slice", "sort", "sort_by", "std", "str.join", "sum", "tail", "top_k", "top_k_by",
    "unique", "unique_counts", "value_counts", "var",
]  # fmt: skip
"""They look at other records, change their number, give another result in each run, or are Python functions."""


def called(name: str, example: Example | None) -> pl.Expr:
    if example is not None:
        found: pl.Expr = example()
        return found
    space, _, method = name.rpartition(".")
    problem: Exception | None = None
    for column in [getattr(COLUMNS[space], space)] if space else [f, i, b, s]:
        try:
            found = getattr(column, method)()
            PROBE.select(found)
        except Exception as error:
            problem = error
        else:
            return found
    raise AssertionError(f"give an example of {name}, which cannot be called without arguments: {problem}")


def depends_on_batches(expression: pl.Expr) -> bool:
    """Whether the results for a few records are others when they come in two batches, wherever these are cut."""
    whole = PROBE.with_columns(expression)
    return any(
        not whole.equals(pl.concat([part.with_columns(expression) for part in (PROBE[:cut], PROBE[cut:])]))
        for cut in (1, 2, 4)
    )


@pytest.mark.filterwarnings("ignore")
def test_every_method_of_expressions_is_allowed_or_refused_and_what_is_allowed_looks_at_one_record_only() -> None:
    """A new method that is not pinned as refused must not depend on how records are batched."""
    refused, dependent = set(), set()
    for name, example in examples():
        expression = called(name, example)
        if elementwise_problem(expression, PROBE.lazy().with_columns(expression)):
            refused.add(name)
        elif depends_on_batches(expression):
            dependent.add(name)
    assert dependent == set()
    assert sorted(refused) == sorted(set(REFUSED))


KNOWN = s.str.to_lowercase().replace_strict({"a": "b"}, default=None)
"""Used twice, it is computed once, for which the plan has a node of its own."""

MORE_ALLOWED = [
    i.is_in(ONLY_SERIES),
    i.is_in(ONLY_SERIES.implode()),
    i.fill_null(strategy="zero"),
    i.fill_null(strategy="one"),
    pl.int_ranges(0, i),
    pl.lit(1),
    pl.lit("Explode"),
    pl.lit([1, 2]),
    pl.lit(None),
    pl.struct("i", "f"),
    pl.concat_list("i", "i"),
    pl.concat_str("s", "s"),
    pl.format("{}-{}", "i", "s"),
    pl.coalesce("i", "i"),
    pl.when(i > 1).then(f).otherwise(0.0),
    pl.max_horizontal("i", "f"),
    pl.sum_horizontal("i", "f"),
    pl.any_horizontal("b"),
    pl.date_ranges("day", "day"),
    pl.datetime(2026, i.fill_null(1), 1),
    pl.duration(hours=i),
    pl.first(),
    pl.nth(1),
    pl.all().exclude("i"),
    pl.col("^nu.*$"),
    numbers.list.eval(pl.element().cum_sum()),
    numbers.list.drop_nulls(),
    numbers.list.eval(pl.element().sort().head(1)),
    numbers.list.eval(pl.element().fill_null(strategy="forward")),
    numbers.list.eval(pl.len()),
    numbers.list.eval(pl.element().filter(pl.element() > 1)),
    numbers.list.eval(pl.element().shift()),
    texts.list.eval(pl.element().replace({"a": "b"})),
    (i + 1).replace({1: 2}).replace_strict({2: 3}, default=0) + 1,
    pl.when(KNOWN.is_null()).then("s").str.to_uppercase().fill_null(KNOWN),
    KNOWN.fill_null(KNOWN + "x"),
    f.bin_intervals([0.0], labels=["x", "y"]).cast(pl.String),
    s.cast(enum_type()).to_physical(),
    day.dt.is_business_day(holidays=[date(2026, 1, 5)]),
    s.hash(),
    s.str.to_date("%Y", strict=False),
    s.str.to_datetime("%Y", strict=False),
    pl.col("Explode").alias("Strptime"),
]

MORE_REFUSED = [
    (pl.len(), "aggregate"),
    (KNOWN.fill_null(KNOWN.max()), "aggregate"),
    (i.replace(i, i) + i.replace(i, i), "replace"),
    (pl.row_index(), "other records"),
    (pl.int_range(0, 6), "other records"),
    (pl.int_range(0, pl.len()), "other records"),
    (pl.lit(ONLY_SERIES), "a column of values"),
    (pl.lit(pl.Series([1])), "a column of values"),
    (i.is_in(i), "is-in"),
    (pl.lit(ONLY_SERIES).is_in(i), "other records"),
    (i.fill_null(strategy="forward"), "forward_fill"),
    (i.fill_null(strategy="mean"), "fill_null"),
    (pl.when(i > i.max()).then(1), "aggregate"),
    (i - i.mean(), "aggregate"),
    (pl.col("s").cast(pl.Categorical).to_physical(), "use pl.Enum"),
    (pl.repeat(1, 6), "other records"),
    (pl.date_range(date(2026, 1, 1), date(2026, 1, 6)), "other records"),
    (pl.arg_where(b), "other records"),
    (pl.corr("i", "f"), "other records"),
    (pl.cum_sum("i"), "cum_sum"),
    (i.replace(i, i), "replace"),
    (numbers.list.eval(pl.element().shuffle()), "random"),
    (numbers.list.explode(), "the number of records"),
    (pl.fold(pl.lit(0), lambda a, e: a + e, [i]), r"\.map\(function\)"),
    (pl.reduce(lambda a, e: a + e, [i]), "map_batches"),
    (numbers.list.eval(pl.element().map_elements(abs, return_dtype=pl.Int64)), "Python function"),
    *((e, "give format=") for e in (s.str.to_date(), s.str.to_datetime(), s.str.to_time(), s.str.strptime(pl.Date))),
    (s.str.to_date(strict=False).is_null(), "give format="),
    (texts.list.eval(pl.element().str.to_date()), "give format="),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("expression", MORE_ALLOWED, ids=str)
def test_an_expression_that_looks_at_one_record_is_allowed(expression: pl.Expr) -> None:
    frame = PROBE.with_columns(Explode=1)
    assert elementwise_problem(expression, frame.lazy().with_columns(expression)) == ""
    if "Explode" not in expression.meta.root_names():
        assert not depends_on_batches(expression)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("expression", "problem"), MORE_REFUSED, ids=str)
def test_an_expression_that_depends_on_other_records_is_refused_and_why(expression: pl.Expr, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        select_spec(expression.alias("found")).output_schema(canonical_schema(CARRIED), "node")


CARRIED = PROBE.drop("pair").to_arrow(compat_level=pl.CompatLevel.oldest()).schema


@pytest.mark.parametrize(
    ("aggregate", "problem"),
    [
        (s.str.to_date().max(), "give format="),
        (s.cast(pl.Categorical).to_physical().max(), "use pl.Enum"),
        (i.map_elements(abs, return_dtype=pl.Int64).max(), "Python function"),
    ],
    ids=str,
)
def test_an_aggregate_of_a_window_is_refused_if_it_depends_on_other_groups(aggregate: pl.Expr, problem: str) -> None:
    assert problem in group_problem(aggregate)
    window = WindowedAggregate(("i",), "d", tumbling(1_000), (aggregate.alias("found"),))
    with pytest.raises(UsageError, match=problem):
        window_shape(window, canonical_schema(CARRIED), "node")


def test_an_aggregate_of_a_window_may_look_at_all_records_of_its_group() -> None:
    for aggregate in (
        i.sum(),
        pl.len(),
        i.sort().first(),
        numbers.explode().max(),
        i.filter(b).count(),
        i.rank().max(),
    ):
        assert group_problem(aggregate) == ""
