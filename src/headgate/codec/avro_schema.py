"""Schemas of Avro, and the Arrow types that their values become.

Format: the specification of Avro 1.12, "Schema Declaration" and "Logical Types". Counterpart: ``avro`` decodes values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import pyarrow as pa

from headgate.codec import connect_types
from headgate.codec.arrow import LOCAL_TIME, MOMENT
from headgate.dataclass import dataclass
from headgate.errors import UsageError

_PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
NUMBERS = {"int": pa.int32(), "long": pa.int64(), "float": pa.float32(), "double": pa.float64()}

_LOGICAL_TYPES: Mapping[tuple[str, str], tuple[pa.DataType, int, int]] = {
    ("int", "date"): (pa.date32(), 1, 1),
    ("long", "timestamp-millis"): (MOMENT, 1_000, 1),
    ("long", "timestamp-micros"): (MOMENT, 1, 1),
    ("long", "timestamp-nanos"): (MOMENT, 1, 1_000),
    ("long", "local-timestamp-millis"): (LOCAL_TIME, 1_000, 1),
    ("long", "local-timestamp-micros"): (LOCAL_TIME, 1, 1),
    ("long", "local-timestamp-nanos"): (LOCAL_TIME, 1, 1_000),
    ("int", "time-millis"): (pa.time64("ns"), 1_000_000, 1),
    ("long", "time-micros"): (pa.time64("ns"), 1_000, 1),
}
"""Base and logical type → the Arrow type, and what a number is multiplied with and divided by."""


@dataclass(frozen=True, slots=True)
class AvroField:
    """A field of a record. ``default``: as the schema has it, if ``has_default``."""

    name: str
    type: AvroType
    aliases: tuple[str, ...]
    has_default: bool
    default: Any


@dataclass(frozen=True, slots=True)
class AvroType:
    """A schema, or a part of one.

    Attributes:
        kind: a primitive, ``"record"``, ``"enum"``, ``"array"``, ``"map"``, ``"fixed"``, ``"union"``, or
            ``"reference"`` to a type that it is itself a part of.
        column: what values become, unless there is a problem.
        inner: the type of the items of an array and of the values of a map; the branches of a union.
        scale: what numbers of a logical type are multiplied with and divided by.
        is_uuid: whether texts are UUIDs.
        is_scaled_decimal: whether records are decimals, each with a scale of its own, which become texts.
        problem: why values cannot be a column, of this type or within it; "": they can.
        definitions: of a reference: named types.
    """

    kind: str
    column: pa.DataType
    name: str = ""
    fields: tuple[AvroField, ...] = ()
    inner: tuple[AvroType, ...] = ()
    symbols: tuple[str, ...] = ()
    default_symbol: str | None = None
    size: int = 0
    scale: tuple[int, int] | None = None
    is_uuid: bool = False
    is_scaled_decimal: bool = False
    problem: str = ""
    definitions: Mapping[str, AvroType | None] = field(default_factory=dict, compare=False, repr=False)

    def resolve(self) -> AvroType:
        """Return the type that a reference is to, or this one."""
        found = self.definitions[self.name] if self.kind == "reference" else self
        assert found is not None, "references are followed after all types are known"
        return found


def parse_schema(text: str, where: str, references: Sequence[str] = (), *, is_partial: bool = False) -> AvroType:
    """Return a schema of Avro.

    Args:
        text: it, as JSON.
        where: what has it, for errors.
        references: schemas that define types which it uses.
        is_partial: only some of the fields are columns; the others may have types that no column can have.

    Raises:
        UsageError: it is none, or its values cannot be columns.
    """
    parser = _Parser(where)
    for one in references:
        parser.parse(_loaded(one, where), "")
    found = parser.parse(_loaded(text, where), "")
    if found.problem and not is_partial:
        raise UsageError(f"{where}: {found.problem}")
    return found


def _loaded(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        if text.strip() in _PRIMITIVES:
            return text.strip()
        raise UsageError(f"{where} is not a schema of Avro, which is JSON: {text[:100]!r}") from None


class _Parser:
    """Reads a schema; named types are known from where they are defined on."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._named: dict[str, AvroType | None] = {}

    def parse(self, given: Any, space: str) -> AvroType:
        if isinstance(given, list):
            return self._union(tuple(self.parse(one, space) for one in given))
        if isinstance(given, str):
            if given in _PRIMITIVES:
                return AvroType(given, _column_of(given))
            return self._known(given if "." in given or not space else f"{space}.{given}", given)
        if not isinstance(given, dict) or "type" not in given:
            raise self._refuse(f"{given!r} is no type")
        kind = given["type"]
        if kind in ("record", "error", "enum", "fixed"):
            return self._define(given, space)
        if kind in ("array", "map"):
            inner = self.parse(given.get("items" if kind == "array" else "values"), space)
            of_map = pa.struct([("key", pa.large_string()), ("value", inner.column)])
            column = pa.large_list(inner.column if kind == "array" else of_map)
            return AvroType(kind, column, inner=(inner,), problem=inner.problem)
        return self._logical(self.parse(kind, space), given)

    def _define(self, given: dict[str, Any], space: str) -> AvroType:
        name = given.get("name")
        if not isinstance(name, str):
            raise self._refuse(f"a type {given['type']!r} has no name")
        space = name.rpartition(".")[0] if "." in name else given.get("namespace", space) or ""
        full = name if "." in name or not space else f"{space}.{name}"
        self._named[full] = None
        try:
            found = self._defined(given, space, name.rpartition(".")[2])
        except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
            raise self._refuse(f"type {full!r} lacks or misuses {error}") from error
        self._named[full] = found
        return found

    def _defined(self, given: dict[str, Any], space: str, name: str) -> AvroType:
        if given["type"] == "enum":
            return AvroType(
                "enum", pa.large_string(), name, symbols=tuple(given["symbols"]), default_symbol=given.get("default")
            )
        if given["type"] == "fixed":
            return self._logical(AvroType("fixed", pa.large_binary(), name, size=int(given["size"])), given)
        fields = tuple(
            AvroField(
                one["name"],
                self.parse(one["type"], space),
                tuple(one.get("aliases", ())),
                "default" in one,
                one.get("default"),
            )
            for one in given["fields"]
        )
        if given.get("connect.name") == connect_types.SCALED_DECIMAL:
            return AvroType("record", pa.large_string(), name, fields, is_scaled_decimal=True)
        column = pa.struct([pa.field(f.name, f.type.column) for f in fields])
        return AvroType("record", column, name, fields, problem=_first_problem([f.type for f in fields]))

    def _known(self, full: str, given: str) -> AvroType:
        found = self._named.get(full, self._named.get(given))
        if found is not None:
            return found
        if (own := full if full in self._named else given) in self._named:
            problem = f"type {own!r} contains itself, which no column can"
            return AvroType("reference", pa.null(), own, problem=problem, definitions=self._named)
        raise self._refuse(f"type {given!r} is not defined")

    def _logical(self, base: AvroType, given: dict[str, Any]) -> AvroType:
        logical, connect = given.get("logicalType"), str(given.get("connect.name"))
        is_decimal = logical == "decimal" or connect == connect_types.DECIMAL
        if is_decimal and base.kind in ("bytes", "fixed"):
            precision, scale = connect_types.decimal_digits(given)
            if not isinstance(precision, int) or not 0 < precision <= 38:
                return replace(base, problem=f"a decimal of {precision} digits; columns have 38 at most")
            if not isinstance(scale, int) or not 0 <= scale <= precision:
                problem = (
                    f"a decimal of {precision} digits with {scale} of them after the point, which no column can hold"
                )
                return replace(base, problem=problem)
            return AvroType(base.kind, pa.decimal128(precision, scale), base.name, size=base.size)
        found = _LOGICAL_TYPES.get((base.kind, str(logical))) or connect_types.NUMBERS.get((base.kind, connect))
        if found is not None:
            return AvroType(base.kind, found[0], scale=(found[1], found[2]))
        if connect == connect_types.ZONED_TIMESTAMP and base.kind == "string":
            return replace(base, column=MOMENT)
        if logical == "uuid" and base.kind == "string":
            return replace(base, is_uuid=True)
        return base

    def _union(self, branches: tuple[AvroType, ...]) -> AvroType:
        columns = {str(one.column) for one in branches if one.kind != "null"}
        problem = _first_problem(branches)
        if len(records := records_of(branches)) > 1 and not problem:
            problem = f"a union of several records ({', '.join(records)}), which no column can tell apart"
        if len(columns) > 1 and not problem:
            problem = f"a union of several types ({', '.join(sorted(columns))}), which no column can hold"
        column = next((one.column for one in branches if one.kind != "null"), pa.null())
        return AvroType("union", column, inner=branches, problem=problem)

    def _refuse(self, problem: str) -> UsageError:
        return UsageError(f"{self._where}: {problem}")


def records_of(branches: Iterable[AvroType]) -> list[str]:
    """Return the names of the records among types, without the spaces that they are in."""
    return [one.name.rpartition(".")[2] for one in branches if one.kind in ("record", "reference")]


def _first_problem(types: Iterable[AvroType]) -> str:
    return next((one.problem for one in types if one.problem), "")


def _column_of(kind: str) -> pa.DataType:
    others = {"null": pa.null(), "boolean": pa.bool_(), "bytes": pa.large_binary(), "string": pa.large_string()}
    return NUMBERS.get(kind) or others[kind]
