"""A start that starts over, and one that finishes what somebody else began to reset (docs/spec/starting-over.md).

Counterpart: ``runtime.driver.starting_over``, which does it; ``headgate reset`` does the same without a program.
"""

from __future__ import annotations

from collections.abc import Sequence

from headgate.model.definition import PipelineDefinition
from headgate.model.progress import Observer
from headgate.runtime.driver.reset_plan import Plan
from headgate.runtime.driver.starting_over import StartingOver


def start_over(definition: PipelineDefinition, watcher: Observer, leave: Sequence[str] = ()) -> None:
    """Delete the checkpoints of the pipeline and all its output, but for that of the sinks to ``leave`` (SO10).

    The directory is there.

    Raises:
        UsageError: the pipeline runs, or something of it cannot be deleted; nothing was changed.
        FencedError, CorruptionError, StorageError
    """
    config = definition.config
    with StartingOver.holding_the_lock(config.checkpoint_root, config.name, definition, leave=leave) as resetting:
        if not leave:  # else that is ordered anew, without what is left
            resetting.finish()
        plan = resetting.look()
        if not plan.is_empty:
            resetting.carry_out(plan)
            watcher.on_note(f"it starts over; deleted: {deleted(plan)}")


def finish(definition: PipelineDefinition, watcher: Observer) -> None:
    """Finish a reset that was cut short (SO3); nothing happens if there is none.

    Raises:
        UsageError, CorruptionError, StorageError: it cannot be finished now.
    """
    config = definition.config
    if not StartingOver.is_due(config.checkpoint_root, config.name):
        return
    with StartingOver.holding_the_lock(config.checkpoint_root, config.name, definition) as resetting:
        if resetting.finish():
            watcher.on_note("a reset that was cut short is finished: it begins at the beginning")


def deleted(plan: Plan) -> str:
    """Return what goes, in one line."""
    count = len(plan.checkpoints)
    parts = [f"{count} checkpoint{'s' * (count != 1)}"] if count else []
    parts += [f"the captured DataFrame of source '{name}'" for name in plan.captured]
    held = [found for found in plan.targets if found.holding.what]
    parts += [f"{found.holding.what} of sink '{found.target.sink}' ({found.holding.where})" for found in held]
    return ", ".join(parts) or "nothing, for nothing was there"
