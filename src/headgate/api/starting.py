"""What a start is told about the checkpoint that it begins with, as users say it (docs/spec/savepoints.md)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

from headgate.errors import UsageError
from headgate.model.config import PipelineConfig, StartConfig
from headgate.model.ids import CheckpointId
from headgate.storage.backends import absolute_location

Restorable: TypeAlias = str | os.PathLike[str] | int
"""A savepoint's place, the checkpoints of a pipeline (``DIR/NAME``), one of them (``DIR/NAME/chk-ID``), or the id of
one of the pipeline's own."""


def start_config(
    config: PipelineConfig,
    restore: Restorable | None,
    go_back_behind: int | None,
    allow_unclaimed_state: Sequence[str],
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
    return StartConfig(_location(config, restore), behind, frozenset(allow_unclaimed_state))


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
