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
    """The type of ``ASK_AGAIN``, which ``trigger`` returns while its snapshot is not complete yet."""

    ASK_AGAIN = "ask again"


ASK_AGAIN = AskAgain.ASK_AGAIN
"""Returned by the ``trigger`` of a hook that has begun a snapshot which other processes complete. Headgate calls
``trigger`` again a few milliseconds later, until the checkpoint ends or its timeout has passed (EI40)."""


@dataclass(frozen=True, slots=True)
class HookContext:
    """The run of a pipeline that calls a hook.

    Attributes:
        pipeline: the name of the pipeline.
        hook: the name under which the hook was added.
        generation: a number that rises with every start and restart of the pipeline. Pass it to the external system, so
            that the system can refuse calls of a replaced driver that is still alive somewhere.
        life: identifies the life of the pipeline; a pipeline that starts over has another life.
        home: the checkpoint directory of the pipeline, as a URL.
    """

    pipeline: str
    hook: str
    generation: int
    life: str = ""
    home: str = ""


class CoordinatorHook(ABC):
    """Base class for an external system that takes its own snapshot with every checkpoint, and goes back to it.

    The driver has one object for the whole run. A thread of the hook's own makes all calls, one after another; each
    must end within the hook's timeout. If the hook is also a ``CheckpointListener``, it hears how checkpoints end.

    Attributes:
        timeout: the timeout of each call, for a hook that a source brings along. For other hooks, the timeout of
            ``add_hook`` counts.
    """

    timeout: Duration = HOOK_TIMEOUT

    def open(self, context: HookContext) -> None:  # noqa: B027 - a default
        """Called when a generation begins, so again with every restart. ``restore`` or ``reset`` follows.

        Default: does nothing.
        """

    @abstractmethod
    def trigger(self, checkpoint_id: int) -> bytes | AskAgain | None:
        """Take part in a checkpoint, and return the data that ``restore`` will need, at most 1 MiB.

        Headgate stores the data in the manifest. It calls ``trigger`` before it triggers any source. If ``trigger``
        raises or exceeds its timeout, the checkpoint is aborted, and ``trigger`` is called again later with a higher
        number; what the aborted call did in the external system must not matter then. A checkpoint whose ``trigger``
        succeeds may still be aborted. If the snapshot takes a while, return ``ASK_AGAIN`` to be called again.
        """

    @abstractmethod
    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        """Go back to the moment at which ``trigger(checkpoint_id)`` returned ``data``: a generation begins there.

        ``data`` is None if ``trigger`` returned nothing, or if the checkpoint is older than the hook. The call may be
        repeated. A start that names a savepoint or a checkpoint passes the data that this one holds, although it has
        another number in this pipeline. The pipeline that took it may already have used the numbers that
        follow, so make sure that no reader meets markers of that pipeline.
        """

    @abstractmethod
    def reset(self) -> None:
        """Go back to the very beginning: a generation begins without any checkpoint.

        It need not be the first generation. The call may be repeated.
        """

    def close(self) -> None:  # noqa: B027 - a default
        """Called when the run has ended. Default: does nothing."""


@runtime_checkable
class HookedSource(Protocol):
    """A source that brings a hook along, under the name of its operator. Optional."""

    def coordinator_hook(self) -> CoordinatorHook | None:
        """Return a hook, or None. Called once, when the pipeline is built."""

    def without_hook(self) -> object:
        """Return a source of the same records that passes over markers: for runs that only look at them."""
