"""The states that the operators of a pipeline declare: whose rows can be written before any run (WS2).

Counterparts: ``operators.catalog``, which has the operators; ``stored_state.catalog``, which tells what a checkpoint
has. Both say it in the same shapes, so rows are checked alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headgate.codec.snapshot import STATE_PREFIX
from headgate.model.definition import PipelineDefinition
from headgate.model.graph import Node, Role
from headgate.model.identity_parts import ACCUMULATORS
from headgate.model.plan import Vertex
from headgate.model.state_identity import StateIdentity
from headgate.operators.keyed import key_columns
from headgate.operators.process.spec import StatefulFunctionSpec
from headgate.operators.reduce import ReduceSpec
from headgate.operators.timestamps import WithTimestampsSpec
from headgate.runtime.stored_state.shapes import Shape, shape_of
from headgate.state.descriptors import Section, section_of
from headgate.state.timers import TIMERS, TimeKind, TimersMeta, timer_section
from headgate.state.ttl import TTL_SECTION, TtlMeta


@dataclass(frozen=True, slots=True)
class Declared:
    """What an operator of a pipeline has for state.

    Attributes:
        node: the operator.
        vertex: the chain that it is in.
        states: shapes of its keyed states by name, those of its timers among them; None: not told before a run.
        meta: sections that belong to no key, of an operator that begins.
    """

    node: Node
    vertex: Vertex
    states: Mapping[str, Shape] | None = None
    meta: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def is_source(self) -> bool:
        """Whether it reads input."""
        return self.node.role is Role.SOURCE

    @property
    def has_rows(self) -> bool:
        """Whether it keeps anything of records; event time is none of that."""
        return bool(self.node.state_text) and not self.is_source and not isinstance(self.node.spec, WithTimestampsSpec)


def declared_in(definition: PipelineDefinition, now_ms: int) -> dict[str, Declared]:
    """Return what each operator of a pipeline declares. ``now_ms``: processing time of what begins (TM8, TL5)."""
    return {
        str(node.name): _declared(node, vertex, now_ms) for vertex in definition.plan.vertices for node in vertex.nodes
    }


def _declared(node: Node, vertex: Vertex, now_ms: int) -> Declared:
    spec = node.spec
    identity = StateIdentity(node.state_text)
    if isinstance(spec, ReduceSpec):
        states = _shapes(identity, [Section(ACCUMULATORS, spec.schema, spec.keys)])
        return Declared(node, vertex, {name: replace(shape, keys=spec.keys) for name, shape in states.items()})
    if not isinstance(spec, StatefulFunctionSpec):
        return Declared(node, vertex)
    keys = key_columns(spec.schema, spec.keys)
    sections = [section_of(keys, descriptor) for descriptor in spec.descriptors]
    meta: dict[str, bytes] = {}
    if any(descriptor.ttl is not None for descriptor in spec.descriptors):
        meta[TTL_SECTION] = TtlMeta(now_ms).encode()
    if spec.has_timers:
        sections += [timer_section(keys, kind) for kind in TimeKind]
        meta[TIMERS] = TimersMeta(now_ms, has_ended=False).encode()
    return Declared(node, vertex, _shapes(identity, sections), meta)


def _shapes(identity: StateIdentity, sections: list[Section]) -> dict[str, Shape]:
    return {section.name: shape_of(identity, STATE_PREFIX, section.name, section.schema) for section in sections}
