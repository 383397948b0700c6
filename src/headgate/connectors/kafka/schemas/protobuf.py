"""Kafka's values of Protobuf, with the package ptars: decoded into the fields of a message, encoded column by column.

A generated class describes the message. The description travels to the workers, not the class. With a schema registry
a value begins with a zero byte, the id of its schema in four bytes, and the index of its message in that schema. Fields
have numbers, so that values of older and newer schemas are read without asking for these. A column is written as the
field of its name. What Protobuf cannot hold as it is, such as a null in a field that has none, is refused: without a
word it would become zero, or be left out. Fields without a column are not set.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.avro import cut_out
from headgate.connectors.files.line_decoders import Decoded, Refused, isolate, one_batch
from headgate.connectors.kafka.schemas.frames import FRAME_BYTES, ID_HEADER, NO_FRAME
from headgate.dataclass import dataclass
from headgate.distribution import install_command
from headgate.errors import UsageError
from headgate.operators.schemas import MAP_FIELDS, canonical_schema, canonical_type, to_canonical

_WELL_KNOWN = "google/protobuf/"
"""Files whose names begin like this come with Protobuf."""

_WELL_KNOWN_CYCLES = ("google.protobuf.Struct", "google.protobuf.Value", "google.protobuf.ListValue")
"""Messages that come with Protobuf and contain themselves."""


@dataclass(frozen=True, slots=True)
class ProtobufFile:
    """A file with definitions.

    Attributes:
        description: serialized, as Protobuf describes files.
        needs: the names of the files that it imports, but for those that come with Protobuf.
    """

    name: str
    description: bytes
    needs: tuple[str, ...]

    @property
    def is_well_known(self) -> bool:
        """Whether it comes with Protobuf."""
        return self.name.startswith(_WELL_KNOWN)


@dataclass(frozen=True, slots=True)
class ProtobufMessage:
    """A message. Paths of fields have a dot between the names.

    Attributes:
        files: those that define it, and first those that others need.
        indexes: how values may say which message of its file it is.
        index: how Confluent's client in Java says it.
        enums: path of each field with names for numbers, and these.
        required: paths of the fields without which a value cannot be read.
        choices: path of a message, and fields of it of which a value has at most one.
        cycles: paths of fields with messages that contain themselves, which are bytes in a column.
    """

    name: str
    files: tuple[ProtobufFile, ...]
    indexes: tuple[bytes, ...]
    index: bytes
    enums: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
    required: tuple[str, ...]
    choices: tuple[tuple[str, tuple[str, ...]], ...]
    cycles: tuple[str, ...]


def message_of(generated: object, where: str = "a Kafka source") -> ProtobufMessage:
    """Return what a generated class describes.

    Raises:
        UsageError: it is none.
    """
    descriptor = getattr(generated, "DESCRIPTOR", None)
    if descriptor is None or not hasattr(descriptor, "full_name") or not hasattr(descriptor, "file"):
        raise UsageError(
            f"format='protobuf' of {where} needs schema=Message, a class that protoc generated, not {generated!r}"
        )
    files: dict[str, ProtobufFile] = {}
    _add(descriptor.file, files)
    indexes = _indexes_of(descriptor)
    fields = list(_fields_in(descriptor, "", ()))
    group = next((path for path, field in fields if field.type == field.TYPE_GROUP), None)
    if group is not None:
        raise UsageError(
            f"message {descriptor.full_name} has a group, field '{group}', which {where} does not know; give it a "
            "message without that field, which is passed over in values that have it"
        )
    enums = [
        (path, tuple((one.name, one.number) for one in field.enum_type.values))
        for path, field in fields
        if field.enum_type
    ]
    choices = {
        (path.rpartition(".")[0], tuple(one.name for one in field.containing_oneof.fields)): None
        for path, field in fields
        if field.containing_oneof is not None and len(field.containing_oneof.fields) > 1
    }
    return ProtobufMessage(
        descriptor.full_name,
        tuple(files.values()),
        tuple(dict.fromkeys(indexes)),
        indexes[-1],
        tuple(enums),
        tuple(path for path, field in fields if field.is_required),
        tuple(choices),
        tuple(path for path, field in fields if _is_cycle(descriptor, path, field)),
    )


def handler_of(message: ProtobufMessage, *, timestamp_unit: str, enums: str) -> Any:
    """Return what ptars makes of a message. ``enums``: what they are as columns, ``"string"`` or ``"int32"``.

    Raises:
        UsageError: the package is not installed.
    """
    try:
        ptars, library = importlib.import_module("ptars"), importlib.import_module("ptars._lib")
    except ImportError as error:
        raise UsageError(
            f"format='protobuf' needs the package ptars: {install_command('protobuf')}, on every worker"
        ) from error
    large = {"use_large_string": True, "use_large_binary": True, "use_large_list": True}
    config = ptars.PtarsConfig(timestamp_unit=timestamp_unit, enum_repr=enums, **large)
    descriptions = [one.description for one in message.files]
    return library.ProtoRegistry(descriptions).create_for_message(message.name, config)


def _fields_in(descriptor: Any, begin: str, around: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield all fields with their paths; a message within itself is not looked into."""
    for field in descriptor.fields:
        path = f"{begin}{field.name}"
        yield path, field
        inner = field.message_type
        if inner is not None and inner.full_name not in around and not inner.file.name.startswith(_WELL_KNOWN):
            yield from _fields_in(inner, f"{path}.", (*around, descriptor.full_name))


def _is_cycle(descriptor: Any, path: str, field: Any) -> bool:
    """Whether the message of a field contains itself, or is that of one of the messages around it."""
    if field.message_type is None:
        return False
    around = [descriptor.full_name]
    for name in path.split(".")[:-1]:
        descriptor = descriptor.fields_by_name[name].message_type
        around.append(descriptor.full_name)
    return field.message_type.full_name in (*around, *_WELL_KNOWN_CYCLES)


def _indexes_of(descriptor: Any) -> tuple[bytes, ...]:
    """Return the index of a message in its file, in the forms of the wire; the last one is that of Java's client.

    It is its number there, after those of the messages around it. Some clients count the entries of maps among the
    messages of a message, and others do not. The first message of a file is one zero byte for short.
    """
    paths: list[list[int]] = [[], []]
    inner = descriptor
    while inner is not None:
        around = inner.containing_type
        same = list(inner.file.message_types_by_name.values() if around is None else around.nested_types)
        written = [one for one in same if not one.GetOptions().map_entry]
        for path, counted in zip(paths, (same, written), strict=True):
            path.insert(0, [one.full_name for one in counted].index(inner.full_name))
        inner = around
    forms = [b"".join(map(_zigzag, (len(path), *path))) for path in paths]
    return (*forms, *(b"\0" for path in paths if path == [0]))


def _zigzag(number: int) -> bytes:
    number, found = 2 * number, bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _add(file: Any, files: dict[str, ProtobufFile]) -> None:
    for one in file.dependencies:
        if one.name not in files:
            _add(one, files)
    needs = tuple(one.name for one in file.dependencies if not one.name.startswith(_WELL_KNOWN))
    files[file.name] = ProtobufFile(file.name, file.serialized_pb, needs)


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


CHUNK_BYTES = 64 << 20
"""Records that are encoded at once, in memory: ptars makes an array of at most 2 GiB of them."""

_TIME_US_MIN, _TIME_US_MAX = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The first and the last microsecond that Protobuf has a timestamp for."""

_NUMBER = re.compile(r"0|-?[1-9]\d{0,9}")
"""How a number of an enum is written that has no name."""


class ProtobufEncoder:
    """Encodes records as one message."""

    def __init__(self, message: ProtobufMessage, columns: pa.Schema) -> None:
        """``columns``: of the records.

        Raises:
            UsageError: records do not fit, or the package is not installed.
        """
        self._handler, self._message = handler_of(message, timestamp_unit="us", enums="int32"), message
        self._fields: pa.Schema = self._handler.schema()
        self._enums = {path: dict(names) for path, names in message.enums}
        self._check(list(columns), self._fields, "")

    def encode(self, batch: pa.RecordBatch, head: bytes) -> pa.Array:
        """Return the values, each after ``head``.

        Raises:
            UsageError: a record has a value that the message cannot hold.
        """
        names = [field.name for field in self._fields if field.name in batch.schema.names]
        own = {field.name: field for field in self._fields}
        self._check_choices("", {name: batch.column(name) for name in names})
        columns = [self._fitted(batch.column(name), own[name], name) for name in names]
        fitted = pa.RecordBatch.from_arrays(columns, names)
        rows = max(1, CHUNK_BYTES * batch.num_rows // max(1, batch.nbytes))
        parts = [
            self._handler.record_batch_to_array(fitted.slice(begin, rows)) for begin in range(0, batch.num_rows, rows)
        ]
        values = pa.concat_arrays([one.cast(pa.large_binary()) for one in parts] or [pa.array([], pa.large_binary())])
        if not head:
            return values
        return pc.binary_join_element_wise(
            pa.scalar(head, pa.large_binary()), values, pa.scalar(b"", pa.large_binary())
        )

    # -- which columns fit

    def _check(self, given: list[pa.Field], fields: pa.Schema | pa.StructType, begin: str) -> None:
        """Check that the fields of a message can be made of columns."""
        wanted = {field.name: field for field in fields}
        name = self._message.name
        for column in given:
            path = f"{begin}{column.name}"
            if column.name not in wanted:
                raise UsageError(f"message {name} has no field for column '{path}'; drop it, or add the field")
            if path in self._message.cycles:
                raise UsageError(
                    f"field '{path}' of message {name} is of a message that contains itself, which KafkaSink cannot "
                    "write; drop the column"
                )
            self._check_type(column.type, wanted[column.name].type, path)
        there = {column.name for column in given}
        for path in self._message.required:
            inner = path.removeprefix(begin)
            if path.startswith(begin) and "." not in inner and inner not in there:
                raise UsageError(f"message {name} requires field '{path}', and records have no such column")

    def _check_type(self, given: pa.DataType, wanted: pa.DataType, path: str) -> None:
        if pa.types.is_struct(given) and pa.types.is_struct(wanted):
            self._check(list(given), wanted, f"{path}.")
        elif pa.types.is_map(wanted):
            entry = given.value_type if pa.types.is_large_list(given) else None
            if entry is None or not pa.types.is_struct(entry) or tuple(one.name for one in entry) != MAP_FIELDS:
                raise self._misfit(given, wanted, path)
            self._check_type(entry.field(0).type, wanted.key_type, f"{path}.key")
            self._check_type(entry.field(1).type, wanted.item_type, f"{path}.value")
        elif pa.types.is_large_list(given) and pa.types.is_large_list(wanted):
            self._check_type(given.value_type, wanted.value_type, path)
        else:
            wanted = pa.large_string() if path in self._enums else wanted
            if not _fits(given, wanted):
                raise self._misfit(given, wanted, path)

    def _misfit(self, given: pa.DataType, wanted: pa.DataType, path: str) -> UsageError:
        name = self._message.name
        return UsageError(
            f"message {name} has field '{path}' of type {wanted}, and the column is of type {given}; cast it"
        )

    # -- which values fit

    def _fitted(self, column: pa.Array, field: pa.Field, path: str) -> pa.Array:
        """Return a column as ptars takes the field."""
        if column.null_count and (not field.nullable or path in self._message.required):
            raise UsageError(
                f"column '{path}' has a null, and the field of message {self._message.name} has none; fill it, or make "
                "the field optional"
            )
        dtype = field.type
        if pa.types.is_struct(dtype):
            there = {one.name: column.field(one.name) for one in dtype if column.type.get_field_index(one.name) >= 0}
            return self._struct(there, column, dtype, path)
        if pa.types.is_map(dtype):
            return self._map(column, dtype, path)
        if pa.types.is_large_list(dtype):
            items = self._fitted(column.flatten(), dtype.value_field, path)
            return pa.LargeListArray.from_arrays(_offsets(column), items)
        if path in self._enums:
            return self._numbers(column, path)
        if pa.types.is_timestamp(dtype):
            _check_times(column, path)
        try:
            return column.cast(dtype)
        except pa.ArrowInvalid as error:
            raise UsageError(f"column '{path}' has a value that Protobuf cannot hold: {error}") from error

    def _struct(self, columns: dict[str, pa.Array], column: pa.Array, dtype: pa.StructType, path: str) -> pa.Array:
        is_there = column.is_valid()
        inner = {name: one.filter(is_there) for name, one in columns.items()}
        self._check_choices(path, inner)
        rows = pa.array(np.cumsum(is_there.to_numpy(zero_copy_only=False)) - 1, mask=column.is_null().to_numpy(False))
        fitted = [
            self._fitted(inner[field.name], field, f"{path}.{field.name}") for field in dtype if field.name in inner
        ]
        children = [one.take(rows) for one in fitted] if column.null_count else fitted
        return pa.StructArray.from_arrays(children, list(inner), mask=column.is_null())

    def _map(self, column: pa.Array, dtype: pa.MapType, path: str) -> pa.Array:
        entries = column.flatten()
        if entries.null_count:
            raise UsageError(f"column '{path}' has a map with an entry that is null; leave it out")
        keys = self._fitted(entries.field(0), pa.field("key", dtype.key_type, False), f"{path}.key")
        values = self._fitted(entries.field(1), pa.field("value", dtype.item_type, False), f"{path}.value")
        pairs = pa.table({"row": pc.list_parent_indices(column), "key": keys})
        if pairs.group_by(["row", "key"]).aggregate([]).num_rows < len(keys):
            raise UsageError(f"column '{path}' has a map with a key that is there twice; keep one of them")
        return pa.MapArray.from_arrays(_offsets(column).cast(pa.int32()), keys, values)

    def _numbers(self, column: pa.Array, path: str) -> pa.Array:
        """Return the numbers of an enum; one that has no name is itself a text, as the source gives it."""
        texts = pc.unique(column.drop_null())
        numbers = [self._number(text, path) for text in texts.to_pylist()]
        return pa.array(numbers, pa.int32()).take(pc.index_in(column, texts))

    def _number(self, text: str, path: str) -> int:
        if (known := self._enums[path].get(text)) is not None:
            return known
        if _NUMBER.fullmatch(text) and -(2**31) <= int(text) < 2**31:
            return int(text)
        raise UsageError(f"column '{path}' has {text!r}, which is none of {', '.join(self._enums[path])}")

    def _check_choices(self, path: str, columns: dict[str, pa.Array]) -> None:
        """Check that of fields that exclude each other each record has at most one."""
        for where, names in self._message.choices:
            there = [name for name in names if name in columns]
            if where != path or len(there) < 2:
                continue
            counts = sum(columns[name].is_valid().to_numpy(zero_copy_only=False).astype(np.int64) for name in there)
            if (counts > 1).any():
                raise UsageError(
                    f"a record has values for several of the columns {', '.join(there)}, of which message "
                    f"{self._message.name} has one at a time; make the others null"
                )


def _check_times(column: pa.Array, path: str) -> None:
    found = pc.min_max(column.cast(pa.int64()))
    first, last = found["min"].as_py(), found["max"].as_py()
    if first is not None and not _TIME_US_MIN <= first <= last <= _TIME_US_MAX:
        raise UsageError(f"column '{path}' has a time outside of the years 1 to 9999, which Protobuf cannot hold")


def _offsets(column: pa.Array) -> pa.Array:
    """Return where the items of each list begin, when they are one after the other."""
    sizes = column.value_lengths().to_numpy(zero_copy_only=False)
    return pa.array(np.concatenate(([0], np.cumsum(sizes))).astype(np.int64))


def _fits(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether each value of a column has one of the field, which a cast finds."""
    if given == wanted or given == canonical_type(wanted):
        return True
    if pa.types.is_integer(given) and pa.types.is_integer(wanted):
        if pa.types.is_signed_integer(given) == pa.types.is_signed_integer(wanted):
            return bool(given.bit_width <= wanted.bit_width)
        return bool(pa.types.is_unsigned_integer(given) and given.bit_width < wanted.bit_width)
    return bool(given == pa.float32() and wanted == pa.float64())
