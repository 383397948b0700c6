"""A pipeline as it is handed to whoever runs it: configuration, graph, plan and the schema of every node.

Made by ``headgate.api.pipeline``; read by ``headgate.spark.session`` and the simulator's single-thread runner.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headgate.model.config import PipelineConfig
from headgate.model.graph import MAIN, Graph, OutputTag
from headgate.model.ids import NodeName
from headgate.model.lineage import Lineage
from headgate.model.plan import Plan
from headgate.model.targets import Target


@dataclass(frozen=True, slots=True)
class HookSpec:
    """A hook of the coordinator, under its name.

    ``hook`` is a ``connectors.hooks.CoordinatorHook``. It stays in the driver: the definition travels to the workers
    without it (EI3).
    """

    name: str
    hook: object
    timeout_ms: int

    def __reduce__(self) -> tuple[type[HookSpec], tuple[str, None, int]]:
        """Leave the hook where it is."""
        return HookSpec, (self.name, None, self.timeout_ms)


@dataclass(frozen=True, slots=True)
class PipelineDefinition:
    """Everything that is needed to run a pipeline.

    Attributes:
        outputs: ``node → tag → pyarrow.Schema`` of each of its outputs, for every node of the graph (a sink's entry is
            the schema of the records that it receives, as its main output).
        diverts: bad records go to the sink node ``bad-records`` (else the first one fails the pipeline).
        hooks: of the coordinator, in the order in which they were added.
        forgotten_hooks: names of hooks whose data in an old checkpoint is not needed any more (EI9).
        derived_names: operators that the user gave no name.
        lineages: what tells nodes apart when the program is edited (EV13); of nodes for which it matters.
        targets: of all sinks, as a start writes them down (SO1); None: nothing is written down.
    """

    config: PipelineConfig
    graph: Graph
    plan: Plan
    outputs: dict[NodeName, dict[OutputTag, object]]
    diverts: bool = False
    hooks: tuple[HookSpec, ...] = ()
    forgotten_hooks: frozenset[str] = frozenset()
    derived_names: frozenset[str] = frozenset()
    targets: tuple[Target, ...] | None = None
    lineages: dict[str, Lineage] = field(default_factory=dict)

    def schema(self, node: NodeName, tag: OutputTag = MAIN) -> object:
        """Return the ``pyarrow.Schema`` of one output of ``node``."""
        return self.outputs[node][tag]
