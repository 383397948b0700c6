"""What is done between a pipeline's graph and its start: where it runs, where its files are, what users are told.

Counterparts: ``headgate.api.pipeline``, which calls it all in order; ``headgate.api.placed`` (sources with files of the
pipeline's own), ``headgate.api.homes`` (where pipelines had their checkpoints).
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from headgate.api.homes import remember
from headgate.api.placed import CapturableSource, PlacedSource
from headgate.errors import UsageError
from headgate.model.config import PipelineConfig
from headgate.model.definition import PipelineDefinition
from headgate.model.graph import Graph
from headgate.model.ids import NodeName
from headgate.model.plan import make_plan
from headgate.model.progress import Observer
from headgate.spark.masters import read_master
from headgate.storage.backends import local_directory
from headgate.storage.roots import make_root


def slots_of(master: str | None, spark: Any) -> int | None:
    """Return the slots of the session or master that the pipeline will run on; None where local Spark is ours.

    Raises:
        UsageError: only the cluster itself knows.
    """
    from headgate.spark.session import found_session

    session = found_session(spark, master)
    if session is not None:
        return int(session.sparkContext.defaultParallelism)
    url = master or os.environ.get("HEADGATE_MASTER")
    if url is None:
        return None
    place = read_master(url)
    if not place.is_local:
        raise UsageError(f"say with parallelism= (or --parallelism) how many slots of {url} the pipeline shall use")
    return os.cpu_count() or 1 if place.has_all_processors else place.slots


def check_master(master: str | None, spark: Any) -> None:
    """Refuse a master before anything is written.

    Raises:
        UsageError: it is malformed, or a session is there that is elsewhere.
    """
    if master is None:
        return
    read_master(master)
    if "pyspark" in sys.modules:  # else there is no session
        from headgate.spark.session import found_session

        found_session(spark, master)


def placed_in_directory(graph: Graph, config: PipelineConfig) -> Graph:
    """Tell sources that live in the pipeline's own directory where that is."""
    nodes = []
    for node in graph.nodes:
        if isinstance(node.spec, PlacedSource):
            node = replace(node, spec=node.spec.at(config.checkpoint_root, config.name, str(node.name)))
        nodes.append(node)
    return Graph(tuple(nodes))


def make_checkpoint_directory(config: PipelineConfig) -> None:
    """Make it for whom the user wants, before anything is written there.

    Raises:
        UsageError: it cannot be made, or exists and is not shared as the user wants.
    """
    directory = local_directory(config.checkpoint_root)
    if directory is None:
        return
    try:
        make_root(directory, config.security.access, "checkpoint directory")
    except OSError as error:
        raise UsageError(
            f"checkpoint directory {directory} cannot be created ({error.strerror}); choose a writable directory"
        ) from error


def capture(definition: PipelineDefinition) -> Any:
    """Have sources write what is to be read; return the SparkSession it came from, None if there is none.

    Raises:
        UsageError: naming whose input cannot be written.
    """
    spark = None
    for node in definition.graph.nodes:
        if isinstance(node.spec, CapturableSource):
            spark = _captured(node.name, node.spec) or spark
    return spark


def _captured(name: NodeName, source: CapturableSource) -> Any:
    try:
        return source.capture()
    except UsageError as error:
        raise UsageError(f"operator '{name}': {error.message}") from None


def with_captured(definition: PipelineDefinition) -> PipelineDefinition:
    """Return ``definition`` with every captured DataFrame replaced by a source of its files."""
    if not any(isinstance(node.spec, CapturableSource) for node in definition.graph.nodes):
        return definition
    nodes = tuple(
        replace(node, spec=node.spec.captured()) if isinstance(node.spec, CapturableSource) else node
        for node in definition.graph.nodes
    )
    graph = Graph(nodes)
    plan = make_plan(graph, definition.plan.parallelism, definition.plan.max_parallelism)
    return replace(definition, graph=graph, plan=plan)


def announce(definition: PipelineDefinition, watcher: Observer) -> None:
    """Say where everything is: the default places depend on the directory that one stands in."""
    config = definition.config
    stores = sorted({str(node.spec.store) for node in definition.graph.nodes if hasattr(node.spec, "store")})
    streams = f", streams in {' and '.join(stores)}" if stores else ""
    mode = config.checkpoints.mode.value.replace("_", " ")
    watcher.on_note(f"checkpoints in {config.checkpoint_root}{streams}; records count {mode}{_removed_when(config)}")
    others = remember(config.name, config.checkpoint_root)
    if others:
        places = " and in ".join(others)
        watcher.on_note(f"a pipeline of the same name has its checkpoints in {places}; this run does not continue it")


def _removed_when(config: PipelineConfig) -> str:
    """Return when the checkpoints do not stay, as the end of a sentence (C70)."""
    checkpoints = config.checkpoints
    ends = {"is cancelled": checkpoints.retain_on_cancel, "has failed for good": checkpoints.retain_on_failure}
    removed = [end for end, retains in ends.items() if not retains]
    return f"; the checkpoints are removed when it {' or '.join(removed)}" if removed else ""
