"""``collect``, ``take``, ``show`` and ``to_dataframe``: the records of a stream, from a run without traces.

Such a run has a temporary directory with checkpoints and committed files below the checkpoint directory, so its
result is exactly-once like any sink's, and independent of older and later runs of the same name. It runs only what
the stream needs. What a killed process left there is removed by the next run.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from headgate.api.foreground import refuse_exploring_while_loading, run_to_end
from headgate.api.streams.base_stream import PipelineLike, Records
from headgate.connectors.base import Source
from headgate.connectors.files.file_committer import committed_files
from headgate.connectors.files.file_sink import FileSink
from headgate.dataclass import dataclass
from headgate.errors import HeadgateError, UsageError
from headgate.model.config import Access
from headgate.model.graph import Role
from headgate.model.ids import NodeName
from headgate.model.progress import PipelineHandle, PipelineState
from headgate.plain_text import printable
from headgate.storage.local_files import ProcessDirectory, access_in
from headgate.storage.urls import local_directory

SCRATCH = ".explored"
"""No pipeline can have this name."""


LOOK_INTERVAL = "200ms"
"""Between the checkpoints of a run that ends early: each commits what came since the last one."""

LOOK_S = 0.05
"""Between two looks at what was committed."""

ROWS_SHOWN = 5

_RESULT = "result"


@dataclass(frozen=True, slots=True)
class Bound:
    """The limits of a run that ends before its input does: records of the result, or seconds."""

    limit: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and (isinstance(self.limit, bool) or not isinstance(self.limit, int)):
            raise UsageError(f"limit must be a number of records, not {self.limit!r}")
        if self.limit is not None and self.limit < 0:
            raise UsageError(f"limit must not be negative, but is {self.limit}")
        if self.seconds is not None and (isinstance(self.seconds, bool) or not isinstance(self.seconds, int | float)):
            raise UsageError(f"seconds must be a number, not {self.seconds!r}")
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError(f"seconds must be more than zero, but is {self.seconds}")

    @property
    def is_early(self) -> bool:
        """Whether the run may end before its input does."""
        return self.limit is not None or self.seconds is not None


def run_and_collect(stream: Records, bound: Bound, call: str = "collect") -> pl.DataFrame:
    """Run what ``stream`` needs; return its records."""
    if bound.limit == 0:
        return _frame(stream.schema.empty_table())
    with _explored(stream, bound, call, None) as (files, scratch):
        try:
            tables = [pq.read_table(file).cast(stream.schema) for file in files]
        finally:
            scratch.remove()
    table = pa.concat_tables(tables) if tables else stream.schema.empty_table()
    return _frame(table if bound.limit is None else table.slice(0, bound.limit))


def run_to_dataframe(stream: Records, bound: Bound, spark: Any) -> Any:
    """Run what ``stream`` needs; return its records as a Spark DataFrame. Its files stay until this process ends."""
    from headgate.spark.dataframes import active_session, check_for_spark, read_parquet

    session = spark or active_session()
    if session is None:
        raise UsageError("to_dataframe needs a SparkSession; give spark=, or use collect() for a Polars frame")
    check_for_spark(session, stream.schema)
    with _explored(stream, bound, "to_dataframe", session) as (files, scratch):
        atexit.register(scratch.remove)
        frame = read_parquet(session, files, stream.schema)
        return frame if bound.limit is None else frame.limit(bound.limit)


def show(stream: Records, rows: int) -> None:
    """Print the first records that come out of ``stream``."""
    frame = run_and_collect(stream, Bound(limit=rows), "show")
    with pl.Config(tbl_rows=rows, tbl_cols=-1, fmt_str_lengths=60, tbl_hide_dataframe_shape=True):
        print(printable(str(frame)))


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def temporary_directory(root: str) -> ProcessDirectory:
    """Make the directory of one run below the checkpoint directory ``root``; remove what dead processes left there.

    Raises:
        UsageError: ``root`` is not a directory of this machine (or mounted on it).
    """
    local = local_directory(root)
    if local is None:
        raise UsageError(
            f"results are exchanged through the checkpoint directory, which must be a directory and not {root}; "
            "use Checkpointing(dir=) with one that all workers reach, or write to headgate.FileSink and call run()"
        )
    return ProcessDirectory(local / SCRATCH, access_in(local) if local.is_dir() else Access.OWNER)


@contextmanager
def _explored(stream: Records, bound: Bound, call: str, spark: Any) -> Iterator[tuple[Sequence[str], ProcessDirectory]]:
    """Run what ``stream`` needs; yield the files with its records, and their directory, which the caller removes.

    Raises:
        UsageError: a source never ends and there is no bound.
        HeadgateError: it was stopped by another caller, or failed.
    """
    refuse_exploring_while_loading(call)
    parent = stream._pipeline
    names = [edge.upstream for edge in stream._all_edges]
    if not bound.is_early:
        _refuse_endless(parent, names, call)
    scratch = temporary_directory(parent._checkpoint_root())
    try:
        pipeline = parent._explored(stream._all_edges, str(scratch.path), LOOK_INTERVAL if bound.is_early else None)
        where = scratch.path / _RESULT
        sink = FileSink.within(str(where), "parquet", roll_interval=0 if bound.is_early else None)
        node = pipeline._builder.claim_name(_RESULT, None)
        pipeline._builder.add(node, Role.SINK, stream._all_edges, sink, stream.schema)
        watcher = _Watcher(bound, where)
        is_finished = run_to_end(lambda: watcher.watching(pipeline.start(spark=spark))).is_finished
        if not (is_finished or watcher.has_enough):
            raise HeadgateError(f"{call}() was stopped before its input ended: there is no result")
        yield _files(where), scratch
    except BaseException:
        scratch.remove()
        raise


class _Watcher:
    """Stops a run when it has committed enough records or its time is over."""

    def __init__(self, bound: Bound, where: Path) -> None:
        self._bound, self._where = bound, where
        self._pace = threading.Event()
        self._rows: dict[str, int] = {}  # of each committed file: it does not change
        self.has_enough = False

    def watching(self, handle: PipelineHandle) -> PipelineHandle:
        if self._bound.is_early:
            threading.Thread(target=self._watch, args=(handle,), name="headgate-look", daemon=True).start()
        return handle

    def _watch(self, handle: PipelineHandle) -> None:
        with suppress(HeadgateError):  # a caller that waits for the run gets the same failure
            if not self._has_enough(handle):
                return
            # before stop(): the run may be over, and its result asked for, when that returns
            self.has_enough = True
            handle.stop()

    def _has_enough(self, handle: PipelineHandle) -> bool:
        """Wait until there is enough; False when the run ended before."""
        left_s = self._bound.seconds
        while left_s is None or left_s > 0:
            self._pace.wait(LOOK_S)
            if handle.progress.state.has_ended:
                return False
            if self._bound.limit is not None and self._count() >= self._bound.limit:
                return True
            if left_s is not None and handle.progress.state is PipelineState.RUNNING:
                left_s -= LOOK_S
        return True

    def _count(self) -> int:
        """Return how many records are committed."""
        for file in _files(self._where):
            if file not in self._rows:
                self._rows[file] = pq.read_metadata(file).num_rows
        return sum(self._rows.values())


def _files(where: Path) -> list[str]:
    return [str(where / file) for file in committed_files(str(where))] if where.is_dir() else []


def _refuse_endless(parent: PipelineLike, names: Sequence[NodeName], call: str) -> None:
    """Refuse what would never return and fill the disk meanwhile: every source has to end."""
    for node in parent._builder.upstream_of(names).nodes:
        end = node.spec.how_to_end() if node.role is Role.SOURCE and isinstance(node.spec, Source) else None
        if end is not None:
            raise UsageError(
                f"{call}() returns when all input has ended, but source '{node.name}' never ends: give limit= or "
                f"seconds= for a look, {end}, or write to a sink such as headgate.FileSink and call run()"
            )
