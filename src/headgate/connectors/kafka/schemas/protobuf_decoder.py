"""Decodes Kafka's values of Protobuf into the fields of a message, with the package ptars.

With a schema registry
a value begins with a zero byte, the id of its schema in four bytes, and the index of its message in that schema. Fields
have numbers, so that values of older and newer schemas are read without asking for these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.avro import cut_out
from headgate.connectors.files.line_decoders import Decoded, Refused, isolate, one_batch
from headgate.connectors.kafka.schemas.frames import FRAME_BYTES, ID_HEADER, NO_FRAME
from headgate.connectors.kafka.schemas.protobuf_message import ProtobufMessage, handler_of
from headgate.operators.schemas import canonical_schema, to_canonical

_HEADER_BYTES = {0: FRAME_BYTES, 1: 17}
"""How long a header with an id or with a GUID is without the index of a message, by its first byte."""

_Rows: TypeAlias = npt.NDArray[np.int64]


class ProtobufDecoder:
    """See the module.

    Attributes:
        schema: of the records that it makes.
    """

    def __init__(self, message: ProtobufMessage, *, is_framed: bool, cuts_times: bool = False) -> None:
        """Prepare for values of ``message``.

        Args:
            is_framed: whether values begin as a schema registry demands it.
            cuts_times: whether parts of a microsecond are left out of times.
        """
        self._cuts_times = cuts_times
        self._handler = handler_of(message, timestamp_unit="ns", enums="string")
        self._far_handler = handler_of(message, timestamp_unit="us", enums="string")
        self._message, self._is_framed = message, is_framed
        self.schema = canonical_schema(self._handler.schema())

    def decode(self, values: pa.Array, rows: _Rows, headers: pa.Array | None) -> Decoded:
        """Return the records and the refused values. ``rows``: what to call each value."""
        refused = Refused()
        if self._is_framed:
            values, rows = self._without_frame(values, rows, headers, refused)
        messages = values.cast(pa.binary())
        good = np.ones(len(values), np.bool_)
        batches: list[pa.RecordBatch] = []

        def parse(low: int, high: int) -> str | None:
            try:
                found = self._read(pa.concat_arrays([messages.slice(low, high - low)]))
                batches.append(to_canonical(found, self.schema))
            except ValueError as error:
                return str(error).removeprefix("failed to decode Protobuf message: ")
            return None

        isolate(len(values), parse, values, rows, refused, good)
        whole = pa.Table.from_batches(batches, self.schema).combine_chunks()
        return Decoded(one_batch(whole, self.schema), rows[good], refused)

    def _read(self, messages: pa.Array) -> pa.RecordBatch:
        """Read messages, with nanoseconds, and without them where these are cut, or times are too far away for them.

        Raises:
            ValueError: a message is damaged, or would be read as something else than it says.
        """
        found = (self._far_handler if self._cuts_times else self._handler).array_to_record_batch(messages)
        self._refuse_changed(found)
        if self._cuts_times or any(_has_limit(column) for _, column in _times_within(found)):
            found = self._far_handler.array_to_record_batch(messages) if not self._cuts_times else found
            for path, column in _times_within(found):
                if _has_limit(column):
                    raise ValueError(f"field '{path}' has a time that no column can hold")
        return found

    def _refuse_changed(self, batch: pa.RecordBatch) -> None:
        """Refuse what ptars or a column has as something else than the message says, without a word.

        Raises:
            ValueError: two fields of one choice, where the last one counts; a map with a key that is there twice, where
                the last one counts; a duration that is too long; a time with a part of a microsecond.
        """
        for path, column in _columns_within("", _whole(batch)):
            if pa.types.is_timestamp(column.type) and self._cuts_times:
                continue
            if pa.types.is_timestamp(column.type):
                number = column.cast(pa.int64()).drop_null().to_numpy()
                if (number[(number != _LIMITS[0]) & (number != _LIMITS[1])] % 1_000 != 0).any():
                    raise ValueError(
                        f"field '{path}' has a time with a part of a microsecond, which no column can hold"
                    )
            elif pa.types.is_duration(column.type):
                if _has_limit(column):
                    raise ValueError(f"field '{path}' has a duration that no column can hold")
            elif pa.types.is_map(column.type):
                sizes = np.diff(column.offsets.to_numpy())
                pairs = pa.table({"row": np.repeat(np.arange(len(column)), sizes), "key": column.keys})
                if (sizes > 1).any() and pairs.group_by(["row", "key"]).aggregate([]).num_rows < len(pairs):
                    raise ValueError(f"field '{path}' has a key that is there twice")
            elif pa.types.is_struct(column.type):
                for where, names in self._message.choices:
                    if where == path:
                        is_there = [column.field(name).is_valid().to_numpy(zero_copy_only=False) for name in names]
                        if (np.sum(is_there, axis=0, dtype=np.int64) > 1).any():
                            raise ValueError(
                                f"it has several of the fields {', '.join(names)}, of which it may have one"
                            )

    def _without_frame(
        self, values: pa.Array, rows: _Rows, headers: pa.Array | None, refused: Refused
    ) -> tuple[pa.Array, _Rows]:
        """Return what follows the frames; values whose header names their schema have none."""
        indexes = self._message.indexes
        offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, 8 * values.offset)
        raw = (values.buffers()[2] or pa.py_buffer(b"")).to_pybytes() + bytes(FRAME_BYTES + max(map(len, indexes)))
        data = np.frombuffer(raw, np.uint8)
        begin, size = offsets[:-1], np.diff(offsets)
        is_framed = (size > FRAME_BYTES) & (data[begin] == 0)
        skip = np.zeros(len(values), np.int64)
        for index in indexes:
            found = data[begin[:, None] + np.arange(FRAME_BYTES, FRAME_BYTES + len(index))]
            skip[(found == np.frombuffer(index, np.uint8)).all(axis=1)] = FRAME_BYTES + len(index)
        is_message = (skip > 0) & (skip <= size)
        if headers is not None:
            by_header, is_other = self._in_headers(headers)
            is_framed[by_header], is_message[by_header], skip[by_header] = True, ~is_other, 0
        other = f"it is not {self._message.name}, but another message of its schema"
        frame = f"{NO_FRAME}, and with its message"
        for problem, is_bad in ((frame, ~is_framed), (other, is_framed & ~is_message)):
            if is_bad.any():
                refused.add(problem, rows[is_bad], values.filter(pa.array(is_bad)))
        is_good = is_framed & is_message
        begin, size, skip = begin[is_good], size[is_good], skip[is_good]
        return cut_out(raw, begin + skip, size - skip), rows[is_good]

    def _in_headers(self, headers: pa.Array) -> tuple[_Rows, npt.NDArray[np.bool_]]:
        """Return which values have a header that names their schema, and whether it says another message."""
        is_id = pc.equal(pc.struct_field(headers.flatten(), "key"), ID_HEADER)
        which = pc.list_parent_indices(headers).filter(is_id).to_numpy()
        named = pc.struct_field(headers.flatten(), "value").filter(is_id).to_pylist()
        indexes = [one[_HEADER_BYTES.get(one[0], len(one)) :] if one else b"" for one in named]
        return which, np.array([bool(one) and one not in self._message.indexes for one in indexes], np.bool_)


_LIMITS = (-(2**63), 2**63 - 1)
"""What ptars makes of times and durations that are too long."""


def _has_limit(column: pa.Array) -> bool:
    number = column.cast(pa.int64()).drop_null()
    return bool(pc.any(pc.is_in(number, pa.array(_LIMITS, pa.int64()))).as_py())


def _whole(batch: pa.RecordBatch) -> pa.StructArray:
    return pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))


def _times_within(batch: pa.RecordBatch) -> list[tuple[str, pa.Array]]:
    """Return all columns of times in a batch, with the paths of their fields."""
    return [one for one in _columns_within("", _whole(batch)) if pa.types.is_timestamp(one[1].type)]


def _columns_within(path: str, column: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    """Yield a column and all within it, with the paths of their fields."""
    yield path, column
    dtype = column.type
    if pa.types.is_struct(dtype):
        begin = f"{path}." if path else ""
        for field in dtype:
            yield from _columns_within(f"{begin}{field.name}", column.field(field.name))
    elif pa.types.is_map(dtype):
        yield from _columns_within(f"{path}.value", column.items)
    elif pa.types.is_large_list(dtype):
        yield from _columns_within(path, column.values)
