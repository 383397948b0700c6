"""Mutants of streams that get other columns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.connectors import test_updated_streams as pipelines
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.store import test_columns as decisions
from tests.store import test_schema_updates as tests

from headgate.connectors.streams import sink, source
from headgate.errors import UsageError
from headgate.protocol.store import columns
from headgate.runtime.worker import worker
from headgate.store import chunks, evolving, open_transaction
from headgate.store.catalogue import schemas as sql_schemas
from headgate.store.catalogue import streams as sql_streams
from headgate.store.catalogue.values import ChunkRecord
from headgate.store.evolving import Schemas
from headgate.store.reader import SegmentReader
from headgate.store.store import Store
from headgate.store.streams import OtherSchemaError
from headgate.store.writer import StreamWriter

Test = Callable[..., object]


def any_number_is_a_wider_one() -> AbstractContextManager[None]:  # S76
    return patched(columns, "is_widening", lambda old, new: True)


def a_routing_key_may_become_a_float() -> AbstractContextManager[None]:  # S76
    return patched(columns, "_hashes_differently", lambda old, new: False)


def the_same_columns_again_are_another_schema() -> AbstractContextManager[None]:  # S76
    return patched(sql_schemas, "Unchanged", type("Never", (), {}))


def columns_that_somebody_added_meanwhile_go() -> AbstractContextManager[None]:  # S76
    real = columns.update

    def update(present: Any, wanted: Any, routing_key: Any) -> Any:
        names = {name for name, _ in wanted}
        return real(tuple(column for column in present if column[0] in names), wanted, routing_key)

    return patched(sql_schemas, "update", update)


def what_is_there_would_need_a_value() -> AbstractContextManager[None]:  # S76
    return patched(sql_schemas, "check_added_may_be_null", lambda stream, present, wanted: None)


def everything_was_written_in_the_newest_schema() -> AbstractContextManager[None]:  # S77
    return patched(Schemas, "of", lambda self, version: self._catalogue.schemas(self._stream)[-1])


def everything_was_written_in_the_schema_of_its_reader() -> AbstractContextManager[None]:  # S77
    return patched(Schemas, "of", lambda self, version: self._stream.schema)


def a_chunk_does_not_say_its_schema() -> AbstractContextManager[None]:  # S77
    def record(self: chunks.BatchChunk, path: str) -> ChunkRecord:
        return ChunkRecord(path, self.chunk.size_bytes, self.chunk.entries)

    return patched(chunks.BatchChunk, "record", record)


def values_that_do_not_fit_are_cut() -> AbstractContextManager[None]:  # S77
    real = evolving._column

    def column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
        at = batch.schema.get_field_index(field.name)
        return real(batch, field) if at < 0 else batch.column(at).cast(field.type, safe=False)

    return patched(evolving, "_column", column)


def a_float_loses_digits() -> AbstractContextManager[None]:  # S77
    return patched(evolving, "fits_if_small", lambda old, new: True)


def what_fits_goes_with_what_does_not() -> AbstractContextManager[None]:  # S77
    real = SegmentReader._in_own_schema

    def in_own_schema(self: SegmentReader, part: Any, batch: pa.RecordBatch) -> pa.RecordBatch:
        try:
            return real(self, part, batch)
        except OtherSchemaError as error:
            raise UsageError(str(error)) from None

    return patched(SegmentReader, "_in_own_schema", in_own_schema)


def only_the_newest_schema_is_written() -> AbstractContextManager[None]:  # S78
    return patched(Schemas, "fitting", lambda self, schema: None)


def events_of_two_schemas_lie_in_one_chunk() -> AbstractContextManager[None]:  # S78
    return patched(chunks, "in_schema", lambda batch, schema: batch)


def a_writer_stays_in_its_schema() -> AbstractContextManager[None]:  # S78
    real = StreamWriter._take_schema

    def take_schema(self: StreamWriter, schema: pa.Schema) -> None:
        before = self.stream
        real(self, schema)
        self.stream = before

    return patched(StreamWriter, "_take_schema", take_schema)


def a_transaction_takes_newer_columns() -> AbstractContextManager[None]:  # S78
    return patched(open_transaction, "check_schema_at_begin", lambda *_: None)


def a_program_of_before_does_not_find_its_stream() -> AbstractContextManager[None]:  # S78
    return patched(sql_streams, "newest_fit", lambda schemas, difference: None)


def a_pipeline_reads_the_newest_schema() -> AbstractContextManager[None]:  # SC50
    real = source.read_as
    return patched(source, "read_as", lambda schemas, built: real(schemas, None))


def a_pipeline_that_meets_what_does_not_fit_is_started_again() -> AbstractContextManager[None]:  # SC50
    return patched(worker, "OtherSchemaError", type("Never", (Exception,), {}))


def a_pipeline_of_before_is_refused() -> AbstractContextManager[None]:  # SC51
    return patched(sink, "written_as", lambda schemas, schema: None)


MUTANTS: dict[Mutant, Test] = {
    any_number_is_a_wider_one: decisions.test_a_number_never_becomes_one_that_does_not_hold_it,
    a_routing_key_may_become_a_float: tests.test_equal_keys_are_never_told_apart_by_an_update,
    the_same_columns_again_are_another_schema: tests.test_the_same_update_again_makes_no_schema,
    columns_that_somebody_added_meanwhile_go: (
        tests.test_two_processes_that_update_at_once_both_get_what_they_add_or_are_told
    ),
    what_is_there_would_need_a_value: tests.test_a_column_that_must_not_be_null_is_not_added,
    everything_was_written_in_the_newest_schema: tests.test_events_of_before_are_read_in_the_newest_schema,
    everything_was_written_in_the_schema_of_its_reader: tests.test_a_reader_of_before_goes_on_in_its_schema,
    a_chunk_does_not_say_its_schema: tests.test_events_of_before_are_read_in_the_newest_schema,
    values_that_do_not_fit_are_cut: tests.test_a_reader_of_before_goes_on_in_its_schema,
    a_float_loses_digits: tests.test_a_float_is_never_read_as_one_of_fewer_digits,
    what_fits_goes_with_what_does_not: tests.test_a_reader_of_before_goes_on_in_its_schema,
    only_the_newest_schema_is_written: tests.test_a_writer_of_before_goes_on_and_so_does_its_successor,
    events_of_two_schemas_lie_in_one_chunk: tests.test_a_writer_takes_a_newer_schema_up_with_its_first_event_of_it,
    a_writer_stays_in_its_schema: tests.test_a_writer_takes_a_newer_schema_up_with_its_first_event_of_it,
    a_transaction_takes_newer_columns: tests.test_a_transaction_of_before_is_prepared_and_committed_behind_an_update,
    a_program_of_before_does_not_find_its_stream: (
        tests.test_a_program_of_before_finds_its_stream_and_a_new_one_is_of_version_0
    ),
    a_pipeline_reads_the_newest_schema: pipelines.test_a_pipeline_goes_on_in_the_columns_that_it_was_built_with,
    a_pipeline_that_meets_what_does_not_fit_is_started_again: (
        pipelines.test_a_pipeline_that_meets_what_does_not_fit_says_what_to_do_at_once
    ),
    a_pipeline_of_before_is_refused: pipelines.test_a_pipeline_of_before_goes_on_writing,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_are_caught(mutant: Mutant, tmp_path: Path) -> None:
    test = MUTANTS[mutant]
    tries = iter(range(10))

    def run() -> None:
        if test.__module__ == decisions.__name__:
            test()
            return
        root = tmp_path / str(next(tries))
        with Store.open(root) as store:
            if test.__module__ == pipelines.__name__:
                store.create_stream(pipelines.NAME, pipelines.FIRST, segments=1, routing_key="key")
                test(Store.shared(root))
            else:
                store.create_stream(tests.STREAM, tests.FIRST, segments=2, routing_key="key")
                test(store)

    assert_caught(mutant, run)
