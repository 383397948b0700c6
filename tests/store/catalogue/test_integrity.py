"""Whatever a value of a catalogue is damaged to, a check says so and goes on, and no verb ends in an unknown error."""

from __future__ import annotations

import os
import random

import pytest
from tests.store.catalogue.damaging import Damage, Damaged, columns, damages
from tests.store.catalogue.test_sql import READS, WRITES, fill

from headgate.errors import CorruptionError, HeadgateError, ProtocolViolation
from headgate.store.catalogue import integrity
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.catalogue.tables import metadata
from headgate.store.client.messages import CATALOGUE_SIGNATURES, decode, encode
from headgate.store.streams import StreamDefinition, StreamInfo

CASES_OF_VERBS = int(os.environ.get("HEADGATE_TEST_CASES", "80"))
"""There are some 40,000 of damages and verbs: a few of them each time, others with another seed."""

CASES_OF_COLUMNS = int(os.environ.get("HEADGATE_TEST_CASES", "1"))
SEED = int(os.environ.get("HEADGATE_TEST_SEED", "10"))


def filled(catalogue: SqlCatalogue) -> None:
    """Something of everything, also of former layouts."""
    fill(catalogue)
    stream = catalogue.find_stream("s")
    catalogue.create_stream(StreamDefinition("quiet", stream.schema, 1, None), 1, if_not_exists=False)
    WRITES["scale_stream"](catalogue, stream)


@pytest.fixture(scope="module")
def damaged() -> Damaged:
    return Damaged(filled)


def problems(catalogue: SqlCatalogue) -> list[tuple[str, str]]:
    with catalogue.audit() as audit:
        found = audit.problems()
        for stream in audit.streams():
            audit.schemas(stream)
            list(audit.parts(stream))
        for chunk in audit.chunks():
            for entry in chunk.entries:
                audit.heirs(chunk, entry.segment)
                audit.is_truncated(chunk, entry.segment)
        audit.garbage()
    return found


def test_a_check_tells_of_each_value_of_a_wrong_kind_and_goes_on(damaged: Damaged) -> None:
    check_values(damaged)


def check_values(damaged: Damaged) -> None:
    chance = random.Random(SEED)
    damaged.mend()
    assert problems(damaged.catalogue) == [HELD_FOR_NOBODY]
    for column in columns():
        every = list(damages(damaged, column))
        for damage in chance.sample(every, min(CASES_OF_COLUMNS, len(every))):
            if not damaged.damage(damage):
                continue
            damaged.change("DELETE FROM segments WHERE stream_id = 2")  # something else, of stream 'sealed'
            found = problems(damaged.catalogue)
            assert all("\n" not in what for _, what in found), damage.name
            words = f"its table '{column.table.name}' has "
            told = [what for _, what in found if what.startswith(words) and f" as {column.name} where " in what]
            assert len(told) == (not damage.is_of_its_kind), f"{damage.name}: {found}"
            is_other = column.table.name in ("streams", "segments", "meta")
            assert is_other or "sealed" in [where for where, _ in found], f"{damage.name}: {found}"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "nothing"), (b"\x00\xff", r"the bytes b'\x00\xff'"), ("abc", "'abc'"), (1.5, "1.5")],
    ids=["nothing", "bytes", "text", "number"],
)
def test_what_is_wrong_is_said_with_its_value_and_its_row(damaged: Damaged, value: object, shown: str) -> None:
    damaged.mend()
    assert damaged.damage(Damage(metadata.tables["segments"].columns["end_position"], 0, value, is_of_its_kind=False))
    (problem,) = [what for _, what in problems(damaged.catalogue) if "table" in what]
    assert problem == (
        f"its table 'segments' has {shown} as end_position where a number is expected, "
        "in the row of stream_id 1, segment_id 0"
    )


def test_of_many_rows_that_are_wrong_some_are_said(damaged: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    count, more = damaged.rows_count(metadata.tables["segments"]), "its table 'segments' has more such rows"
    for most in (count, count - 1):
        damaged.mend()
        damaged.change("UPDATE segments SET end_position = 'x'")
        monkeypatch.setattr(integrity, "PROBLEMS_MAX", most)
        found = [what for _, what in problems(damaged.catalogue) if "table 'segments'" in what]
        assert len(found) == count
        assert (more in found) is (most < count)


HELD_FOR_NOBODY = (
    "reader group 'forgotten'",
    "there is none, and stream 's' is held for it; --repair lets go of it",
)
"""What ``fill`` leaves to be mended."""


def test_no_verb_ends_in_an_error_of_another_kind_where_a_value_is_damaged(damaged: Damaged) -> None:
    chance = random.Random(SEED)
    damaged.mend()
    stream = damaged.catalogue.find_stream("s")
    every = [damage for column in columns() for damage in damages(damaged, column)]
    for damage in chance.sample(every, min(CASES_OF_VERBS, len(every))):
        for name in chance.sample(sorted(READS.keys() | WRITES.keys()), 4):
            if damaged.damage(damage):
                check_verb(damaged, damage, name, stream)


def check_verb(damaged: Damaged, damage: Damage, name: str, stream: StreamInfo) -> None:
    try:
        answer = (READS | WRITES)[name](damaged.catalogue, stream)
        decode(encode(answer), CATALOGUE_SIGNATURES[name].gives)  # it is what the verb is declared to give
    except ProtocolViolation:
        raise
    except HeadgateError:
        return
    except Exception as error:
        raise AssertionError(f"{name} with {damage.name}: {error!r}") from error


HANDED_ON = [
    ("segments.end_position", None, "describe_stream"),
    ("streams.is_sealed", None, "find_stream"),
    ("streams.created_ms", None, "find_stream"),
    ("shared_transactions.due_ms", 1.5, "list_streams"),
    ("transactions.epoch", "abc", "transactions"),
    ("holds.position", None, "holds"),
]


@pytest.mark.parametrize(("name", "value", "verb"), HANDED_ON)
def test_what_a_verb_only_hands_on_is_looked_at(damaged: Damaged, name: str, value: object, verb: str) -> None:
    table, _, column = name.partition(".")
    damaged.mend()
    stream, told = damaged.catalogue.find_stream("s"), []
    for row in range(damaged.rows_count(metadata.tables[table])):
        assert damaged.damage(Damage(metadata.tables[table].columns[column], row, value, is_of_its_kind=False))
        try:
            READS[verb](damaged.catalogue, stream)
        except CorruptionError as error:
            told.append(str(error))
    assert told
    assert all(f"its table '{table}' has " in one and f" as {column} where " in one for one in told)


BLOBS = ("streams.schema", "former_schemas.schema", "owners.life", "reader_groups.state")
CHECKED_BY_SUM = ("streams.schema", "former_schemas.schema", "owners.life")
TEXTS = ("streams.retention", "streams.scaling")


@pytest.mark.parametrize("name", [*BLOBS, *TEXTS])
def test_a_value_that_is_damaged_somewhere_is_told(damaged: Damaged, name: str) -> None:
    """Of those without a checksum, which are JSON, another value may be a sound one."""
    table, _, column_name = name.partition(".")
    column, chance = metadata.tables[table].columns[column_name], random.Random(name)
    damaged.mend()
    stream, whole = damaged.catalogue.find_stream("s"), damaged.value(column, 0)
    data = whole.encode() if isinstance(whole, str) else whole
    for number in range(16):
        at, end = sorted(chance.sample(range(len(data) + 1), 2))
        middle = [bytes(end - at), chance.randbytes(end - at), b"", data[at:end] * 2][number % 4]
        other = data[:at] + middle + data[end:]
        if other == data:
            continue
        damage = Damage(column, 0, other.decode("latin-1") if isinstance(whole, str) else other, is_of_its_kind=True)
        assert damaged.damage(damage)
        found = problems(damaged.catalogue)
        assert name not in CHECKED_BY_SUM or found != [HELD_FOR_NOBODY], damage.name
        for verb in ("find_stream", "schemas", "find_group", "owner", "change_group"):
            damaged.damage(damage)
            check_verb(damaged, damage, verb, stream)
