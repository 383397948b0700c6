"""A pipeline as it is handed to whoever runs it: configuration, graph, plan and the schema of every node.

Made by ``headgate.api.pipeline``; read by ``headgate.spark.session`` and the simulator's single-thread runner.
"""

from __future__ import annotations

from dataclasses import dataclass

from headgate.model.config import PipelineConfig
from headgate.model.graph import MAIN, Graph, OutputTag
from headgate.model.ids import NodeName
from headgate.model.plan import Plan


@dataclass(frozen=True, slots=True)
class PipelineDefinition:
    """Everything that is needed to run a pipeline.

    Attributes:
        outputs: ``node → tag → pyarrow.Schema`` of each of its outputs, for every node of the graph (a sink's entry is
            the schema of the records that it receives, as its main output).
        diverts: bad records go to the sink node ``bad-records`` (else the first one fails the pipeline).
    """

    config: PipelineConfig
    graph: Graph
    plan: Plan
    outputs: dict[NodeName, dict[OutputTag, object]]
    diverts: bool = False

    def schema(self, node: NodeName, tag: OutputTag = MAIN) -> object:
        """Return the ``pyarrow.Schema`` of one output of ``node``."""
        return self.outputs[node][tag]
