"""What the workers of a generation are sent when it begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.runtime.driver.test_looping import definition

from headgate.codec import messages
from headgate.model.ids import CheckpointId, Generation, WorkerIndex
from headgate.model.manifest import Manifest
from headgate.runtime.driver.restart import NewGeneration
from headgate.runtime.driver.supervisor_host import LiveGeneration


def deployed(restored: Manifest | None) -> messages.Deploy:
    """Return what the only worker of a generation that continues from ``restored`` is sent."""
    sent: list[Any] = []
    nothing: Any = SimpleNamespace()
    begun = NewGeneration(Generation(2), CheckpointId(8), restored, (), nothing)
    live = LiveGeneration(definition(), begun, nothing, nothing, lambda note: None)
    worker: Any = SimpleNamespace(
        worker=WorkerIndex(0), address=messages.Address("127.0.0.1", 1), connection=SimpleNamespace(send=sent.append)
    )
    live.deploy([worker])
    (deploy,) = sent
    assert isinstance(deploy, messages.Deploy)
    return deploy


@pytest.mark.parametrize("is_draining", [True, False])
def test_sources_of_a_drained_checkpoint_are_told_so_before_they_can_read(is_draining: bool) -> None:  # E9
    """An order to drain would come behind the first records."""
    restored = Manifest(CheckpointId(7), Generation(1), 1, 128, (), is_draining=is_draining)
    assert deployed(restored).is_draining is is_draining


def test_a_first_start_does_not_drain() -> None:
    assert deployed(None).is_draining is False
