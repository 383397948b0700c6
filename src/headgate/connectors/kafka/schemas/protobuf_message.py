"""A message of Protobuf as a generated class describes it. The description travels to the workers, not the class."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from headgate.dataclass import dataclass
from headgate.distribution import install_command
from headgate.errors import UsageError

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
