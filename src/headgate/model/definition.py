"""A pipeline as it is handed to whoever runs it: configuration, graph, plan and the schema of every node.

Made by ``headgate.api.pipeline``; read by ``headgate.spark.session`` and the simulator's single-thread runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
        prepare: actions that must have happened in the driver before the workers start, by node; each is called
            once per start with the active SparkSession (capturing a DataFrame). They are idempotent.
    """

    config: PipelineConfig
    graph: Graph
    plan: Plan
    schemas: dict[NodeName, object]
    diverts: bool = False
    prepare: dict[NodeName, Callable[[object], None]] = field(default_factory=dict)
