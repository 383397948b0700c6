"""Takes the id of a schema off values of JSON, which the serializers of Confluent write in front of them.

A frame is a zero byte and the id in four bytes. Or a header names the schema, and nothing is in front of the value. The
registry is not asked for the schema: JSON says what its fields are called.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.avro import cut_out
from headgate.connectors.files.line_decoders import Refused

ID_HEADER, KEY_ID_HEADER = "__value_schema_id", "__key_schema_id"
"""The headers that may name the schemas of a value and of a key."""

FRAME_BYTES = 5
"""A zero byte and an id."""

NO_FRAME = "it does not begin with the id of a schema, a zero byte and four more"

_Rows = npt.NDArray[np.int64]


def without_frames(values: pa.Array, rows: _Rows, headers: pa.Array) -> tuple[pa.Array, _Rows, Refused]:
    """Return the values without their frames, and those that have none. ``rows``: what to call each value."""
    refused = Refused()
    offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, 8 * values.offset)
    raw = (values.buffers()[2] or pa.py_buffer(b"")).to_pybytes() + b"\1"  # an empty value at the end has no frame
    begin, size = offsets[:-1], np.diff(offsets)
    is_framed = (size >= FRAME_BYTES) & (np.frombuffer(raw, np.uint8)[begin] == 0)
    skip = np.where(is_framed, FRAME_BYTES, 0)
    named = rows_named_by(headers)
    is_framed[named], skip[named] = True, 0
    if not is_framed.all():
        refused.add(NO_FRAME, rows[~is_framed], values.filter(pa.array(~is_framed)))
        begin, size, skip, rows = begin[is_framed], size[is_framed], skip[is_framed], rows[is_framed]
    return cut_out(raw, begin + skip, size - skip), rows, refused


def rows_named_by(headers: pa.Array) -> _Rows:
    """Return which values have a header that names their schema."""
    is_id = pc.equal(pc.struct_field(headers.flatten(), "key"), ID_HEADER)
    named: _Rows = pc.list_parent_indices(headers).filter(is_id).to_numpy()
    return named
