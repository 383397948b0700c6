"""Input that does not end before the test says so, however slow or fast the machine is.

A test that kills, stops or watches a running pipeline needs it to run still when it does. A rate alone cannot promise
that. So a ``Generator`` or ``Nexmark`` with a rate keeps its last records back until its gate, a file, is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headgate.connectors.base import Source, SourceContext
from headgate.connectors.generator import Generator, GeneratorReader
from headgate.model.plan import PipelineDefinition
from headgate.nexmark.events import Nexmark

LOOK_MS = 5


@dataclass(frozen=True)
class Held(Source):
    """A source that is ``inner``, but for its end.

    Each subtask keeps its last records back, as many as ``gates`` say, until the file beside the number is there.
    ``hurries``: when all of them are there, it goes as fast as it can.
    """

    inner: Generator | Nexmark
    gates: tuple[tuple[int, Path], ...]
    hurries: bool = False

    def schema(self) -> Any:
        return self.inner.schema()

    def identity(self) -> str:
        return self.inner.identity()

    def open(self, context: SourceContext) -> HeldReader:
        return HeldReader(self.inner, context, self.gates, hurries=self.hurries)


class HeldReader(GeneratorReader):
    """Delivers what leaves at least one record of each subtask."""

    def __init__(
        self, config: Generator | Nexmark, context: SourceContext, gates: tuple[tuple[int, Path], ...], *, hurries: bool
    ) -> None:
        super().__init__(config, context)
        self._gates, self._hurries = gates, hurries

    def poll(self) -> Any:
        if self._hurries and all(gate.exists() for _, gate in self._gates):
            self._rows_per_ms = None
        return None if self._is_held() else super().poll()

    def wakeup_ms(self) -> int:
        return LOOK_MS if self._is_held() else super().wakeup_ms()

    def _is_held(self) -> bool:
        left = sum(split.remaining() for split in self._splits)
        return any(0 < left <= kept and not gate.exists() for kept, gate in self._gates)


def held(
    definition: PipelineDefinition, gate: Path, keeps: int | None = None, *, hurries: bool = False
) -> PipelineDefinition:
    """Return ``definition`` with every generator that has a rate and an end held by ``gate``.

    ``keeps`` (None: a batch, the least): so many records each subtask keeps back. May be repeated with another gate.
    ``hurries``: no rate holds up who passes the gate.
    """

    def wrapped(node: Any) -> Any:
        spec, gates = (node.spec.inner, node.spec.gates) if isinstance(node.spec, Held) else (node.spec, ())
        is_paced = isinstance(spec, Generator | Nexmark) and spec.rows_per_second is not None and spec.rows is not None
        return replace(node, spec=Held(spec, (*gates, (keeps or spec.batch_rows, gate)), hurries)) if is_paced else node

    vertices = tuple(
        replace(vertex, nodes=tuple(wrapped(node) for node in vertex.nodes)) for vertex in definition.plan.vertices
    )
    return replace(definition, plan=replace(definition.plan, vertices=vertices))
