"""The coordinator's benchmark: it takes whole checkpoints with the product's own parts."""

from __future__ import annotations

from bench.coordinator import Run, acknowledgements, definition_of, machine_alone, run
from bench.harness import Options

from headgate.codec.json_files import decode_log_entry
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Manifest


def test_every_checkpoint_is_completed_and_its_manifest_is_in_the_log() -> None:
    definition = definition_of(50)
    subtasks = definition.plan.subtasks()
    assert len(subtasks) == 50
    run_ = Run(definition)
    for number in (1, 2, 3, 4):
        run_.checkpoint(CheckpointId(number), acknowledgements(subtasks, CheckpointId(number)))
    storage = run_._storage
    entries = [decode_log_entry(storage.get(path), path) for path in storage.list("coordinator/log")]
    manifests = [entry for entry in entries if isinstance(entry, Manifest)]
    assert [manifest.checkpoint for manifest in manifests] == [3, 4], "the others are not kept any more"
    assert all(len(manifest.entries) == 50 for manifest in manifests)
    assert len(manifests[-1].committables) == 5, "one subtask in ten is a sink"
    machine_alone(subtasks, acknowledgements(subtasks, CheckpointId(9)))


def test_the_largest_number_is_judged() -> None:
    result = run(Options(settings={"subtasks": "20,10", "checkpoints": "1"}))
    assert list(result.targets) == ["cpu_ms_20_subtasks", "growth_per_subtask"]
    assert set(result.figures["by_subtasks"]) == {"10", "20"}
    assert result.figures["cpu_ms_20_subtasks"] > 0
