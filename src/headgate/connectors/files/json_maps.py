"""Maps in JSON: objects such as ``{"a": 1}``, which Arrow's reader gets as lists ``[{"key": "a", "value": 1}]``.

Lists of entries, as Headgate writes maps, are left as they are. Of a key that is there twice, the last value counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec
import pyarrow as pa

from headgate.operators.schemas import MAP_FIELDS, has_map

Rewrite: TypeAlias = Callable[[bytes], bytes]

_NO_TEXT = re.compile(rb"-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false")
"""Keys that are written without quotes where a map's keys are no texts."""

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_elements = msgspec.json.Decoder(list[msgspec.Raw])


class MapLines:
    """Makes lines of JSON that have only some columns, with the maps in them as lists."""

    def __init__(self, fields: Sequence[pa.Field]) -> None:
        """Prepare for ``fields``, each of a type with a map in it."""
        wanted = [
            (f"field{at}", msgspec.Raw, msgspec.field(name=field.name, default=msgspec.Raw(b"null")))
            for at, field in enumerate(fields)
        ]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Line", wanted))
        self._columns = [
            (f"field{at}", msgspec.json.encode(field.name) + b":", _rewrite(field.type))
            for at, field in enumerate(fields)
        ]

    def of(self, values: pa.LargeStringArray) -> pa.LargeStringArray:
        """Return a line for each object in ``values``; one that is no JSON stays as it is."""
        return pa.array(
            [self._line(value) for value in values.cast(pa.large_binary()).to_pylist()], pa.large_binary()
        ).cast(pa.large_string())

    def _line(self, value: bytes) -> bytes:
        try:
            found = self._decoder.decode(value)
            parts = [name + rewrite(bytes(getattr(found, place))) for place, name, rewrite in self._columns]
        except (msgspec.DecodeError, RecursionError):
            return value
        return b"{" + b",".join(parts) + b"}"


def _rewrite(dtype: pa.DataType) -> Rewrite:
    """Return what rewrites a value of ``dtype``. A value of another kind is left to the reader, which refuses it."""
    if pa.types.is_map(dtype):
        key_of, item = _key(dtype.key_type), _rewrite(dtype.item_type)
        entries = _rewrite(pa.list_(pa.struct(list(zip(MAP_FIELDS, (dtype.key_type, dtype.item_type), strict=True)))))
        key, value = (msgspec.json.encode(name) + b":" for name in MAP_FIELDS)

        def of_map(text: bytes) -> bytes:
            if not text.startswith(b"{"):
                return entries(text)
            members = _members.decode(text).items()
            found = [key + key_of(name) + b"," + value + item(bytes(inner)) for name, inner in members]
            return b"[" + b",".join(b"{" + one + b"}" for one in found) + b"]"

        return of_map
    if pa.types.is_struct(dtype) and has_map(dtype):
        inner = {field.name: (msgspec.json.encode(field.name) + b":", _rewrite(field.type)) for field in dtype}

        def of_struct(text: bytes) -> bytes:
            if not text.startswith(b"{"):
                return text
            members = _members.decode(text)
            found = [
                name + rewrite(bytes(members[field])) for field, (name, rewrite) in inner.items() if field in members
            ]
            return b"{" + b",".join(found) + b"}"

        return of_struct
    if has_map(dtype):
        element = _rewrite(dtype.value_type)

        def of_list(text: bytes) -> bytes:
            if not text.startswith(b"["):
                return text
            return b"[" + b",".join(element(bytes(inner)) for inner in _elements.decode(text)) + b"]"

        return of_list
    return lambda text: text


def _key(dtype: pa.DataType) -> Callable[[str], bytes]:
    """Return what writes a key: names in JSON are texts, whatever the keys are."""
    if pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype):
        return lambda name: text if _NO_TEXT.fullmatch(text := name.encode()) else msgspec.json.encode(name)
    return msgspec.json.encode
