"""Null lists and maps of Iceberg tables: the library rebuilds those with structs in them, and makes them empty.

Counterpart: ``iceberg_source``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pyarrow as pa


@cache
def keep_null_lists() -> None:
    """Have the library leave lists and maps null that are null in a file. It does so once per process."""
    from pyiceberg.io import pyarrow as library

    class Projection(library.ArrowProjectionVisitor):  # type: ignore[misc]
        """The library's, which forgets nulls: https://github.com/apache/arrow/issues/38809."""

        def list(self, list_type: Any, list_array: pa.Array | None, value_array: pa.Array | None) -> pa.Array | None:
            return _with_nulls(super().list(list_type, list_array, value_array), list_array)

        def map(
            self, map_type: Any, map_array: pa.Array | None, key_result: pa.Array | None, value_result: pa.Array | None
        ) -> pa.Array | None:
            return _with_nulls(super().map(map_type, map_array, key_result, value_result), map_array)

    library.ArrowProjectionVisitor = Projection


def _with_nulls(found: pa.Array | None, given: pa.Array | None) -> pa.Array | None:
    """Return ``found`` with a null where ``given`` has one."""
    if found is None or given is None or found.null_count == given.null_count:
        return found
    whole, mask = pa.concat_arrays([found]), given.is_null()  # a slice has its offsets elsewhere
    if pa.types.is_map(whole.type):
        return pa.MapArray.from_arrays(whole.offsets, whole.keys, whole.items, whole.type, mask=mask)
    return type(whole).from_arrays(whole.offsets, whole.values, type=whole.type, mask=mask)
