"""Schemas as DDL text, read without a JVM: workers have none, nor has a driver that only defines a pipeline (SX3).

Counterpart: Spark's own parser, ``StructType.fromDDL``. What it takes and this does not is refused, never guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pyspark.sql import types

_ATOMIC: dict[str, type[types.DataType]] = {
    "boolean": types.BooleanType,
    "tinyint": types.ByteType,
    "byte": types.ByteType,
    "smallint": types.ShortType,
    "short": types.ShortType,
    "int": types.IntegerType,
    "integer": types.IntegerType,
    "bigint": types.LongType,
    "long": types.LongType,
    "float": types.FloatType,
    "real": types.FloatType,
    "double": types.DoubleType,
    "string": types.StringType,
    "varchar": types.StringType,
    "char": types.StringType,
    "character": types.StringType,
    "binary": types.BinaryType,
    "date": types.DateType,
    "timestamp": types.TimestampType,
    "timestamp_ltz": types.TimestampType,
    "timestamp_ntz": types.TimestampNTZType,
    "decimal": types.DecimalType,
    "dec": types.DecimalType,
    "numeric": types.DecimalType,
}
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)+`|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\w+|[<>(),:])")


def struct_of(ddl: str) -> types.StructType:
    """Return the columns that ``ddl`` describes: ``"id STRING, seen ARRAY<INT>"``.

    Raises:
        ValueError: it is no such text, or one of a kind that is not known here.
    """
    parser = _Parser(_tokens(ddl))
    try:
        fields = parser.fields(end="")
    except IndexError:
        raise ValueError("it ends too early") from None
    if parser.tokens:
        raise ValueError(f"nothing was expected at '{parser.tokens[0]}'")
    return types.StructType(fields)


def _tokens(ddl: str) -> list[str]:
    found, place = [], 0
    text = ddl.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"'{text[place:].strip()[:20]}' is not understood")
        found.append(match[1])
        place = match.end()
    return found


@dataclass
class _Parser:
    """Recursive descent. ``tokens``: those that are left."""

    tokens: list[str] = field(default_factory=list)

    def fields(self, end: str) -> list[types.StructField]:
        """Return fields until ``end``, which stays."""
        found = [self._field()]
        while self._peek() == ",":
            self.tokens.pop(0)
            found.append(self._field())
        if self._peek() != end:
            raise ValueError(f"',' was expected at '{self._peek()}'" if self._peek() else "it ends too early")
        return found

    def _field(self) -> types.StructField:
        name = self.tokens.pop(0)
        if name.startswith("`"):
            name = name[1:-1].replace("``", "`")
        elif not (name[0].isalnum() or name[0] == "_"):
            raise ValueError(f"a name was expected at '{name}'")
        if self._peek() == ":":
            self.tokens.pop(0)
        dtype, is_nullable = self._type(), True
        if self._peek().lower() == "not":
            self.tokens.pop(0)
            self._take("null")
            is_nullable = False
        if self._peek().lower() == "comment":
            del self.tokens[:2]
        return types.StructField(name, dtype, is_nullable)

    def _type(self) -> types.DataType:
        word = self.tokens.pop(0).lower()
        if word == "array":
            return types.ArrayType(*self._inner(1))
        if word == "map":
            return types.MapType(*self._inner(2))
        if word == "struct":
            self._take("<")
            fields = self.fields(end=">")
            self._take(">")
            return types.StructType(fields)
        if word not in _ATOMIC:
            raise ValueError(f"there is no type '{word}'")
        numbers = self._numbers()
        return types.DecimalType(*numbers) if _ATOMIC[word] is types.DecimalType else _ATOMIC[word]()

    def _inner(self, count: int) -> list[types.DataType]:
        self._take("<")
        found = [self._type()]
        while len(found) < count:
            self._take(",")
            found.append(self._type())
        self._take(">")
        return found

    def _numbers(self) -> list[int]:
        if self._peek() != "(":
            return []
        self._take("(")
        found = [int(self.tokens.pop(0))]
        if self._peek() == ",":
            self.tokens.pop(0)
            found.append(int(self.tokens.pop(0)))
        self._take(")")
        return found

    def _peek(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def _take(self, wanted: str) -> None:
        found = self.tokens.pop(0)
        if found.lower() != wanted:
            raise ValueError(f"'{wanted}' was expected at '{found}'")
