"""What a start is told about the checkpoint that it begins with, as users say it (docs/spec/savepoints.md), and what
it does before anything runs.

Counterparts: ``headgate.api.pipeline``, which starts; ``headgate.api.preparing``, which has the single steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

from headgate.api.fresh import finish, start_over
from headgate.api.preparing import capture, make_checkpoint_directory, with_captured
from headgate.connectors.recorded import targets_of
from headgate.errors import UsageError
from headgate.model.config import PipelineConfig, StartConfig
from headgate.model.definition import PipelineDefinition
from headgate.model.ids import CheckpointId
from headgate.model.lineage import Moves
from headgate.model.progress import Observer
from headgate.storage.backends import absolute_location

Restorable: TypeAlias = str | os.PathLike[str] | int
"""A savepoint's place, the checkpoints of a pipeline (``DIR/NAME``), one of them (``DIR/NAME/chk-ID``), or the id of
one of the pipeline's own."""

Begins: TypeAlias = tuple[Restorable | None, int | None, Sequence[str], Mapping[str, str]]
"""``restore``, ``go_back_behind``, ``allow_unclaimed_state`` and ``moved`` of a start."""

NO_MOVES: Mapping[str, str] = MappingProxyType({})
NOWHERE: Begins = (None, None, (), NO_MOVES)
"""A start that says nothing: it goes on from the pipeline's own newest checkpoint."""


def ready(
    definition: PipelineDefinition,
    watcher: Observer,
    begins: Begins,
    fresh: Callable[[], None] | None,
    leave: Sequence[str],
) -> tuple[PipelineDefinition, Any]:
    """Do what comes before a start; return what is started, and the SparkSession that its input came from, if any.

    ``fresh`` is for one that starts over: it looks whether the run can begin, before anything is deleted (SO4), of
    which ``leave`` names the sinks that stay as they are (SO10).

    Raises:
        UsageError: see ``Pipeline.start``.
    """
    config = replace(definition.config, start=start_config(definition.config, *begins))
    definition = replace(definition, config=config, targets=targets_of(definition.graph))
    if fresh is not None and config.start.restore is not None:
        raise UsageError("give fresh=True to begin at the beginning, or restore= to begin elsewhere, not both")
    make_checkpoint_directory(config)
    if fresh is None:
        finish(definition, watcher)
    else:
        fresh()
        start_over(definition, watcher, leave)
    spark = capture(definition)
    return with_captured(definition), spark


def start_config(
    config: PipelineConfig,
    restore: Restorable | None,
    go_back_behind: int | None,
    allow_unclaimed_state: Sequence[str],
    moved: Mapping[str, str] = NO_MOVES,
) -> StartConfig:
    """Return it as plain data.

    Raises:
        UsageError: a value is of the wrong kind.
    """
    if isinstance(allow_unclaimed_state, str):
        raise UsageError(f"allow_unclaimed_state must be a list of names, such as ['{allow_unclaimed_state}']")
    if go_back_behind is not None:
        _check_id(go_back_behind, "go_back_behind")
        if restore is None:
            raise UsageError("go_back_behind= says what is left for restore=: give both")
    behind = None if go_back_behind is None else CheckpointId(go_back_behind)
    return StartConfig(_location(config, restore), behind, frozenset(allow_unclaimed_state), _moves(moved))


def _moves(moved: object) -> Moves:
    """Return what was moved, with absolute paths; URLs as sources and sinks know them.

    Raises:
        UsageError: it is no mapping from places to places.
    """
    if not isinstance(moved, Mapping) or not all(isinstance(one, str | os.PathLike) for one in _both(moved)):
        raise UsageError(
            f"moved must map former places to those of now, such as {{'/old/in': '/new/in'}}, not {moved!r}"
        )
    moves = [(_place(before), _place(now)) for before, now in moved.items()]
    bare = [(before.partition("://")[2], now.partition("://")[2]) for before, now in moves if "://" in before]
    return (*moves, *((before, now) for before, now in bare if now))  # files below a URL are listed without its scheme


def _both(moved: Mapping[object, object]) -> list[object]:
    return [*moved.keys(), *moved.values()]


def _place(given: str | os.PathLike[str]) -> str:
    text = os.fspath(given)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _location(config: PipelineConfig, restore: Restorable | None) -> str | None:
    if restore is None:
        return None
    if isinstance(restore, int):
        _check_id(restore, "restore")
        return f"{config.checkpoint_root.rstrip('/')}/{config.name}/chk-{restore}"
    return absolute_location(restore)


def _check_id(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(
            f"{what} must be the id of a checkpoint, not {value!r}; headgate checkpoints list NAME shows them"
        )
