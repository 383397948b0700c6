"""``CoordinatorHook``: an external system that takes part in checkpoints in the driver (docs/spec/induced.md).

Source: Flink's ``MasterTriggerRestoreHook`` and the ``ReaderCheckpointHook`` of Pravega's connector. Counterparts:
``runtime.driver.hook_calls`` calls it, ``connectors.induced`` has sources that set their barrier where its marker is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from headgate.model.config import Duration

HOOK_TIMEOUT: Duration = "10s"


class AskAgain(Enum):
    """What ``trigger`` returns whose snapshot is not complete yet; see ``ASK_AGAIN``."""

    ASK_AGAIN = "ask again"


ASK_AGAIN = AskAgain.ASK_AGAIN
"""The answer of a hook that has begun a snapshot which others complete: ``trigger`` is called again, a few milliseconds
later, while the checkpoint goes on and its time is not over (EI40)."""


@dataclass(frozen=True, slots=True)
class HookContext:
    """Who calls a hook.

    Attributes:
        pipeline: its name.
        hook: the name under which the hook was added.
        generation: rises with every start and restart of the pipeline. Give it to the external system, which then
            refuses what a driver of an older one, that is still alive somewhere, wants of it.
        life: which life of the pipeline it is: one that starts over has another one.
        home: the directory of its checkpoints, as a URL.
    """

    pipeline: str
    hook: str
    generation: int
    life: str = ""
    home: str = ""


class CoordinatorHook(ABC):
    """Derive from it to have an external system take a snapshot of its own with every checkpoint, and go back with it.

    One object for the whole run, in the driver. All calls come from one thread of its own, one after another; each must
    end within the hook's timeout. A hook that is a ``CheckpointListener`` too hears how checkpoints end.

    Attributes:
        timeout: of a hook that a source brings along; the one of ``add_hook`` counts for others.
    """

    timeout: Duration = HOOK_TIMEOUT

    def open(self, context: HookContext) -> None:  # noqa: B027 - a default
        """A generation begins; ``restore`` or ``reset`` follows. Called again with every restart. Default: nothing."""

    @abstractmethod
    def trigger(self, checkpoint_id: int) -> bytes | AskAgain | None:
        """Take part in a checkpoint; return what ``restore`` will need, at most 1 MiB. It goes into the manifest.

        Called before any source is triggered. One that raises, or is not in time, aborts the checkpoint; what it did
        outside must not matter then, and ``trigger`` comes again with a higher number. Nothing says that the
        checkpoint completes. One whose snapshot takes its time returns ``ASK_AGAIN``, and is asked again.
        """

    @abstractmethod
    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        """Go back to what was when ``trigger(checkpoint_id)`` returned ``data``: a generation begins there.

        ``data`` is None if it returned nothing, or if the checkpoint is older than the hook. May be repeated. A start
        that names a savepoint or a checkpoint gives what that one holds, though it has another number here (EI38).
        Numbers that follow may have been used by the pipeline that it is of: no reader may meet its markers (EI39).
        """

    @abstractmethod
    def reset(self) -> None:
        """Go back to the very beginning: a generation begins without any checkpoint, perhaps not the first one.

        May be repeated.
        """

    def close(self) -> None:  # noqa: B027 - a default
        """The run has ended. Default: nothing."""


@runtime_checkable
class HookedSource(Protocol):
    """A source that brings a hook along, under the name of its operator. Optional."""

    def coordinator_hook(self) -> CoordinatorHook | None:
        """Return a hook, or None. Called once, when the pipeline is built."""

    def without_hook(self) -> object:
        """Return a source of the same records that passes over markers: for runs that only look at them."""
