"""Ownership of sink targets: ask for it, refuse a start without it, take it (docs/spec/lives.md).

Runs in the driver's storage thread, before a generation is claimed. ``protocol.supervision`` decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import cast

from headgate.connectors.base import Sink
from headgate.errors import PutCheckpointsBack, UsageError, with_remedy
from headgate.model.graph import Role
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Life, Owner
from headgate.model.plan import PipelineDefinition
from headgate.protocol.supervision import ownership
from headgate.protocol.supervision.ownership import Objection
from headgate.runtime.driver.sink_commits import refusing_permanent_errors
from headgate.storage.urls import local_directory


class SinkOwnership:
    """The sinks of one pipeline with targets that remember an owner, asked for one identity ``life`` of it."""

    def __init__(self, definition: PipelineDefinition, life: Life, home: str, host: str) -> None:
        """``home`` is where the checkpoints of ``life`` are now, and ``host`` this machine, for messages."""
        self._pipeline, self._life, self._home = definition.config.name, life, home
        self._host = host_of(home, host)
        self._sinks = {
            str(node.name): sink
            for node in definition.graph.nodes
            if node.role is Role.SINK and (sink := cast(Sink, node.spec)).has_owner
        }

    def ask(self) -> dict[str, Owner]:
        """Return what every target remembers. Changes nothing. Sinks that share a target are asked once (LV11).

        Raises:
            UsageError: one can never say so (K5).
            StorageError: repeating is safe.
        """
        found: dict[str, Owner] = {}
        asked: dict[object, str] = {}
        for name, sink in self._sinks.items():
            neighbour = asked.setdefault(_target(name, sink), name)
            if neighbour != name:
                found[name] = ownership.owner_of_sink(name, neighbour, found[neighbour])
                continue
            with refusing_permanent_errors(
                f"sink '{name}' of pipeline '{self._pipeline}' cannot say whose its target is"
            ):
                found[name] = sink.owner(self._pipeline, name)
        return found

    def check(self, owners: dict[str, Owner], following: Generation) -> None:
        """Refuse to go on if any target has another owner (LV2): then no target is changed.

        Raises:
            UsageError: names the owner and the remedy.
        """
        own = [(name, name, owner) for name, owner in owners.items()]
        others = [(name, other.sink, other.owner) for name, owner in owners.items() for other in owner.others]
        for name, known_as, owner in own + others:
            problem = ownership.objection(self._life, owner, following)
            if problem is not None:
                raise self._refusal(name, known_as, owner, problem, following)

    def take(self) -> None:
        """Make this life the owner of every target, all in the same order (LV3).

        Raises:
            UsageError: another owner was quicker, or a target can never be owned (K5).
            StorageError: repeating is safe.
        """
        for name, owner in self._owners_after():
            if not ownership.may_own(self._life, owner):
                raise self._refusal(name, name, owner, Objection.OTHER_LIFE, Generation(0))

    def _owners_after(self) -> Iterator[tuple[str, Owner]]:
        for name, sink in self._sinks.items():
            with refusing_permanent_errors(
                f"sink '{name}' of pipeline '{self._pipeline}' cannot remember whose its target is"
            ):
                owner = sink.own(self._pipeline, name, self._life)
            yield name, owner

    def _refusal(self, name: str, known_as: str, owner: Owner, problem: Objection, following: Generation) -> UsageError:
        """Return the refusal for sink ``name``, which its target knows as ``known_as``: the owner, and the remedy."""
        forget = self._sinks[name].how_to_forget(self._pipeline, known_as)
        sink = f"sink '{name}' of pipeline '{self._pipeline}'"
        if known_as != name:
            sink = f"the target of {sink} knows its sink '{known_as}', which"
        if problem is Objection.OLDER_COPY:
            return UsageError(
                f"{sink} was written to by generation {owner.generation}, but the checkpoints in {self._home} end "
                f"before generation {following}: they are an older copy; restore the newest ones, or, to produce again "
                f"what was committed since, run: {forget}"
            )
        refusal = UsageError(
            f"{sink} belongs to {_owner_text(owner, self._home, self._host)}, and what that one wrote would be there "
            f"twice; {self._what_to_do(owner)}, or, to start over in front of the same target, which keeps what it "
            f"holds, run: {forget}"
        )
        return with_remedy(refusal, PutCheckpointsBack() if self._is_former(owner) else None)

    def _is_former(self, owner: Owner) -> bool:
        return ownership.began_at(owner, self._home, self._host)

    def _what_to_do(self, owner: Owner) -> str:
        if self._is_former(owner):
            return (
                "put these checkpoints back, or give it another name, or delete what that one wrote and start over: "
                "headgate run PROGRAM --fresh"
            )
        return "run the pipeline with that checkpoint directory, or give it another name"


def _target(name: str, sink: Sink) -> object:
    """Return what is equal for sinks that share a target."""
    return name if sink.shared_target is None else (type(sink), sink.shared_target)


def host_of(home: str, host: str) -> str | None:
    """Return ``host`` if ``home`` is a directory of its own; None if it is the same place for all."""
    return None if local_directory(home) is None else host


def _owner_text(owner: Owner, home: str, host: str | None) -> str:
    if owner.life is None:
        return f"another checkpoint directory than {home} (a target that was not given fence.life does not say which)"
    when = datetime.fromtimestamp(owner.life.begun_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    begun = f"begun on {owner.life.host} at {when} UTC"
    if ownership.began_at(owner, home, host):
        return f"former checkpoints of the same name in {home}, {begun} and removed since"
    return f"the pipeline of the same name with its checkpoints in {owner.life.home}, {begun}"
