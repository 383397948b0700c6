"""A pipeline as it is handed to whoever runs it: configuration, graph, plan and the schema of every node.

Made by ``headgate.api.pipeline``; read by ``headgate.spark.session`` and the simulator's single-thread runner.
"""

from __future__ import annotations

from dataclasses import dataclass

from headgate.model.config import PipelineConfig
from headgate.model.graph import Graph
from headgate.model.ids import NodeName
from headgate.model.plan import Plan


@dataclass(frozen=True, slots=True)
class PipelineDefinition:
    """Everything that is needed to run a pipeline.

    Attributes:
        schemas: ``node → pyarrow.Schema`` of its main output, for every node of the graph (a sink's entry is the
            schema of the records it receives).
        diverts: bad records go to the sink node ``bad-records`` (else the first one fails the pipeline).
    """

    config: PipelineConfig
    graph: Graph
    plan: Plan
    schemas: dict[NodeName, object]
    diverts: bool = False
