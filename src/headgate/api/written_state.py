"""Savepoints from frames: state that is made of history, and state that is changed, without a run.

Rows have the columns that ``read_state`` shows. Counterparts: ``runtime.written_state``, ``api.stored_state``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from headgate.api.frames import Frame, arrow_table
from headgate.api.option_checks import whole
from headgate.api.pipeline import Pipeline
from headgate.clock import SYSTEM_CLOCK
from headgate.errors import UsageError
from headgate.model.progress import Location
from headgate.runtime.stored_state.pieces import POSITIONS
from headgate.runtime.stored_state.places import find
from headgate.runtime.written_state.draft import Base, Draft
from headgate.runtime.written_state.writing import Written, write_savepoint
from headgate.storage.backends import absolute_location


@dataclass(frozen=True, slots=True)
class WrittenSavepoint:
    """A savepoint that was written from frames.

    Attributes:
        path: where it is.
        rows: how many rows each state has that was given, by operator and state.
        empty: operators of a new savepoint that have state, and begin without any.
        from_the_beginning: sources that begin at the beginning of their input, because no positions are there.
    """

    path: str
    rows: Mapping[tuple[str, str], int]
    empty: tuple[str, ...] = ()
    from_the_beginning: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = [f"savepoint {self.path} is complete"]
        said += [f"state '{s}' of operator '{o}' has {rows:,} rows" for (o, s), rows in self.rows.items()]
        said += [f"operator '{name}' begins empty" for name in self.empty]
        said += [f"source '{name}' begins at the beginning of its input" for name in self.from_the_beginning]
        return "\n".join(said)


class NewSavepoint:
    """A savepoint to be written. Nothing is written before ``write``."""

    def __init__(self, draft: Draft, path: str) -> None:
        """Use ``new_savepoint``."""
        self._draft = draft
        self._path = path

    def with_state(self, operator: str, state: str, rows: Frame) -> Self:
        """Have ``rows`` be all of one state.

        The rows of a list come in the order of the frame. Where the source has positions to begin at, they are the
        state ``"positions"`` of its name: the columns ``split`` and ``position``, as ``read_state`` shows them.

        Args:
            operator: its name.
            state: its name; of ``reduce`` ``"accumulators"``.
            rows: a frame of Polars, pandas, Arrow or Spark, with the columns that ``read_state`` shows, in any order.

        Raises:
            UsageError: there is no such operator, or it is no frame.
        """
        return self._put(operator, state, rows, must_be_there=False)

    def write(self) -> WrittenSavepoint:
        """Write it. It is complete when this returns, and not there before.

        Raises:
            UsageError: there is something at the path, or a state or its rows do not fit; nothing is left there.
            CorruptionError: what it is made of is damaged.
            StorageError: it could not be read or written; try again.
        """
        return _said(self._path, write_savepoint(self._draft, self._path, SYSTEM_CLOCK.wall_ms()), self._draft)

    def _put(self, operator: str, state: str, rows: Frame, *, must_be_there: bool) -> Self:
        for what, name in (("operator", operator), ("state", state)):
            if not isinstance(name, str) or not name:
                raise UsageError(f"{what} must be a name, not {name!r}")
        table = arrow_table(rows, f"state '{state}' of operator '{operator}'")
        self._draft.put(operator, state, table, must_be_there=must_be_there)
        return self


class EditedSavepoint(NewSavepoint):
    """A savepoint that will be another one, but for what is changed. That one stays as it is."""

    def replace(self, operator: str, state: str, rows: Frame) -> Self:
        """Have ``rows`` be all of one state, in place of those that it has; see ``with_state``.

        Raises:
            UsageError: there is no such operator, or it is no frame.
        """
        return self._put(operator, state, rows, must_be_there=True)

    def drop(self, operator: str, state: str | None = None) -> Self:
        """Give up one state, or an operator with everything that is of it.

        The positions of a source are its state ``"positions"``: without them it begins at the beginning.

        Raises:
            UsageError: there is no such operator.
        """
        self._draft.drop(operator, state)
        return self


def new_savepoint(pipeline: Pipeline, path: Location, *, parallelism: int | None = None) -> NewSavepoint:
    """Begin a savepoint for a pipeline that has not run: its state is made of frames.

    ::

        hg.new_savepoint(p, "/backup/bootstrap").with_state("totals", "sum", frame).write()
        p.run(restore="/backup/bootstrap")

    Operators that get no rows begin empty, and sources without positions at the beginning of their input; what
    ``write`` returns names them.

    Args:
        pipeline: declares the state.
        path: of the savepoint: a directory that is empty or not there yet, or a URL.
        parallelism: into how many parts its state is cut; default that of the pipeline. Any other can restore it.

    Raises:
        UsageError: the pipeline is wrong, or parallelism is out of range.
    """
    if not isinstance(pipeline, Pipeline):
        raise UsageError(f"new_savepoint needs a headgate.Pipeline, not {type(pipeline).__name__}")
    definition = pipeline.definition()
    if parallelism is not None:
        whole(parallelism, definition.plan.max_parallelism, "parallelism")
    draft = Draft(None, definition, SYSTEM_CLOCK.wall_ms(), parallelism)
    return NewSavepoint(draft, _location(path, "path"))


def edit_savepoint(
    source: Location, path: Location, *, id: int | None = None, pipeline: Pipeline | None = None
) -> EditedSavepoint:
    """Begin a savepoint that is another one, or a checkpoint, with some of its state changed.

    ::

        wrong = hg.read_state("/backup/monday", "totals")
        right = wrong.with_columns(value=pl.col("value").clip(0))
        hg.edit_savepoint("/backup/monday", "/backup/mended").replace("totals", "sum", right).write()

    Args:
        source: of a savepoint, ``DIRECTORY/PIPELINE`` for its newest checkpoint, or ``DIRECTORY/PIPELINE/chk-ID``.
        path: of the new savepoint: a directory that is empty or not there yet, or a URL.
        id: of a checkpoint that is not the newest one.
        pipeline: declares the state as it shall be, where that is other than it was: another key, another type, an
            operator that is new. Without it states keep their columns.

    Raises:
        UsageError: there is no such thing, or the pipeline has another number of key groups.
        CorruptionError: it is damaged.
        StorageError: it was removed meanwhile, or cannot be read.
    """
    if pipeline is not None and not isinstance(pipeline, Pipeline):
        raise UsageError(f"edit_savepoint(pipeline=...) needs a headgate.Pipeline, not {type(pipeline).__name__}")
    found = find(_location(source, "source"), id)
    definition = None if pipeline is None else pipeline.definition()
    draft = Draft(Base(found, found.storage()), definition, SYSTEM_CLOCK.wall_ms())
    return EditedSavepoint(draft, _location(path, "path"))


def _location(path: Location, what: str) -> str:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UsageError(f"{what} must be a path or URL, such as '/backup/monday', not {path!r}")
    return absolute_location(path)


def _said(path: str, written: Written, draft: Draft) -> WrittenSavepoint:
    resolved = written.resolved
    rows = {
        (change.operator, name): resolved.rows[section, name].rows.num_rows
        for section, change in resolved.changes.items()
        for name in change.states
        if (section, name) in resolved.rows and (change.operator, name) in draft.given
    }
    rows |= {(source, POSITIONS): sum(map(len, splits.values())) for source, splits in resolved.positions.items()}
    sources = [name for name, one in draft.declared.items() if one.is_source] if draft.base is None else []
    begun = tuple(name for name in dict.fromkeys([*sources, *resolved.positions]) if not resolved.positions.get(name))
    return WrittenSavepoint(path, rows, draft.begins_empty, begun)
