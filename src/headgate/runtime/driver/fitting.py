"""Compares what is to be restored with the pipeline that starts, before anything runs (R12, UA16, EI9).

What fits is decided by ``protocol.checkpoints.recovery`` and ``runtime.checkpoints.in_flight``. Changes nothing.
"""

from __future__ import annotations

from headgate.errors import UsageError, with_remedy
from headgate.model.definition import PipelineDefinition
from headgate.model.lineage import NodeKind
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints import recovery
from headgate.runtime.checkpoints.in_flight import misfit


def check_fit(restored: Manifest, definition: PipelineDefinition) -> None:
    """Refuse to go on if ``restored`` does not fit.

    Raises:
        UsageError
    """
    problem = misfit(restored, definition)
    if problem is not None:
        raise UsageError(problem)
    refusal = recovery.incompatibility_with(restored, definition)
    if refusal is not None:
        raise with_remedy(UsageError(refusal.reason), refusal.remedy)
    known = {spec.name for spec in definition.hooks} | definition.forgotten_hooks
    problem = recovery.unclaimed_hook(restored, known)
    if problem is not None:
        raise UsageError(problem)


def read_before(restored: Manifest, definition: PipelineDefinition) -> dict[str, list[tuple[str, str]]]:
    """Return, by source, what it read when ``restored`` was taken, where that is not what it reads now (EV17)."""
    found = ((name, recovery.matching_of(restored, definition).relocation(name)) for name in definition.lineages)
    return {
        name: [(location.name, location.real) for location in relocation.before]
        for name, relocation in found
        if relocation is not None and definition.lineages[name].kind is NodeKind.SOURCE
    }
