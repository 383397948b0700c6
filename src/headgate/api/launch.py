"""What happens between ``Pipeline.start`` and the first worker: options, reset, directories, captures, notes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from headgate.api.dataframe_source import CapturedDataFrame, DataFrameSource
from headgate.api.pipeline_registry import remember_pipeline
from headgate.connectors.base import Sink, transaction_timeout_ms
from headgate.connectors.registry import targets_of
from headgate.display.progress import duration_text
from headgate.errors import UsageError
from headgate.model.config import PipelineConfig, StartConfig
from headgate.model.graph import Graph, Role
from headgate.model.ids import CheckpointId, NodeName
from headgate.model.lineage import Moves
from headgate.model.plan import PipelineDefinition, make_plan
from headgate.model.progress import Observer
from headgate.runtime.driver.reset import Reset, ResetPlan
from headgate.spark.prerequisites import read_master
from headgate.storage.local_files import make_root
from headgate.storage.urls import absolute_location, local_directory

Restorable: TypeAlias = str | os.PathLike[str] | int
"""A savepoint's place, the checkpoints of a pipeline (``DIR/NAME``), one of them (``DIR/NAME/chk-ID``), or the id of
one of the pipeline's own."""

StartOptions: TypeAlias = tuple[Restorable | None, int | None, Sequence[str], Mapping[str, str]]
"""``restore``, ``go_back_past``, ``allow_unclaimed_state`` and ``moved`` of a start."""

NO_MOVES: Mapping[str, str] = MappingProxyType({})
START_DEFAULT: StartOptions = (None, None, (), NO_MOVES)
"""A start without options: it continues from the pipeline's own newest checkpoint."""


def prepare_start(
    definition: PipelineDefinition,
    watcher: Observer,
    begins: StartOptions,
    fresh: Callable[[], None] | None,
    leave: Sequence[str],
) -> tuple[PipelineDefinition, Any]:
    """Prepare a start; return the definition to run, and the SparkSession that its input came from, or None.

    ``fresh`` is given if the pipeline starts over: it checks that the run can begin before anything is deleted (SO4).
    ``leave`` names the sinks that keep their output.

    Raises:
        UsageError: see ``Pipeline.start``.
    """
    config = replace(definition.config, start=start_config(definition.config, *begins))
    definition = replace(definition, config=config, targets=targets_of(definition.graph))
    if fresh is not None and config.start.restore is not None:
        raise UsageError("give fresh=True to begin at the beginning, or restore= to begin elsewhere, not both")
    make_checkpoint_directory(config)
    # before anything is captured: a reset deletes captures, too
    if fresh is None:
        finish_reset(definition, watcher)
    else:
        fresh()
        start_over(definition, watcher, leave)
    spark = capture_inputs(definition)
    return replace_captured(definition), spark


def start_config(
    config: PipelineConfig,
    restore: Restorable | None,
    go_back_past: int | None,
    allow_unclaimed_state: Sequence[str],
    moved: Mapping[str, str] = NO_MOVES,
) -> StartConfig:
    """Return where a start begins, as plain data.

    Raises:
        UsageError: a value is of the wrong kind.
    """
    if isinstance(allow_unclaimed_state, str):
        raise UsageError(f"allow_unclaimed_state must be a list of names, such as ['{allow_unclaimed_state}']")
    if go_back_past is not None:
        _check_id(go_back_past, "go_back_past")
        if restore is None:
            raise UsageError("go_back_past= says what is left for restore=: give both")
    passed_over = None if go_back_past is None else CheckpointId(go_back_past)
    return StartConfig(_location(config, restore), passed_over, frozenset(allow_unclaimed_state), _moves(moved))


def start_over(definition: PipelineDefinition, watcher: Observer, leave: Sequence[str] = ()) -> None:
    """Delete the pipeline's checkpoints and all its output, except that of the sinks in ``leave``.

    The directory is there.

    Raises:
        UsageError: the pipeline runs, or something of it cannot be deleted; nothing was changed.
        FencedError, CorruptionError, StorageError
    """
    config = definition.config
    with Reset.holding_the_lock(config.checkpoint_root, config.name, definition, leave=leave) as resetting:
        if not leave:  # else a new order is given, without the sinks left out
            resetting.finish()
        plan = resetting.plan()
        if not plan.is_empty:
            resetting.carry_out(plan)
            watcher.on_note(f"it starts over; deleted: {deletion_text(plan)}")


def finish_reset(definition: PipelineDefinition, watcher: Observer) -> None:
    """Finish an interrupted reset (SO3), if there is one.

    Raises:
        UsageError, CorruptionError, StorageError: it cannot be finished now.
    """
    config = definition.config
    if not Reset.is_unfinished(config.checkpoint_root, config.name):
        return
    with Reset.holding_the_lock(config.checkpoint_root, config.name, definition) as resetting:
        if resetting.finish():
            watcher.on_note("a reset that was cut short is finished: it begins at the beginning")


def deletion_text(plan: ResetPlan) -> str:
    """Return what a reset deletes, in one line."""
    count = len(plan.checkpoints)
    parts = [f"{count} checkpoint{'s' * (count != 1)}"] if count else []
    parts += [f"the captured DataFrame of source '{name}'" for name in plan.captured]
    held = [found for found in plan.targets if found.holding.what]
    parts += [f"{found.holding.what} of sink '{found.target.sink}' ({found.holding.where})" for found in held]
    return ", ".join(parts) or "nothing, for nothing was there"


def available_slots(master: str | None, spark: Any) -> int | None:
    """Return the slots of the session or master that the pipeline will run on; None where local Spark is ours.

    Raises:
        UsageError: only the cluster itself knows.
    """
    from headgate.spark.session import find_context

    context = find_context(spark, master)
    if context is not None:
        return int(context.defaultParallelism)
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
        from headgate.spark.session import find_context

        find_context(spark, master)


def place_sources(graph: Graph, config: PipelineConfig) -> Graph:
    """Give DataFrames the directory in which they are captured."""
    nodes = []
    for node in graph.nodes:
        if isinstance(node.spec, DataFrameSource):
            node = replace(node, spec=node.spec.at(config.checkpoint_root, config.name, str(node.name)))
        nodes.append(node)
    return Graph(tuple(nodes))


def make_checkpoint_directory(config: PipelineConfig) -> None:
    """Create the checkpoint directory with the permissions that the user wants.

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


def capture_inputs(definition: PipelineDefinition) -> Any:
    """Have sources capture their input; return its SparkSession, or None.

    Raises:
        UsageError: the input of a source cannot be written; the message names the source.
    """
    spark = None
    for node in definition.graph.nodes:
        if isinstance(node.spec, CapturedDataFrame):
            spark = _capture(node.name, node.spec) or spark
    return spark


def _capture(name: NodeName, source: CapturedDataFrame) -> Any:
    try:
        return source.capture()
    except UsageError as error:
        raise UsageError(f"operator '{name}': {error.message}") from None


def replace_captured(definition: PipelineDefinition) -> PipelineDefinition:
    """Return ``definition`` with every captured DataFrame replaced by a source of its files."""
    if not any(isinstance(node.spec, CapturedDataFrame) for node in definition.graph.nodes):
        return definition
    nodes = tuple(
        replace(node, spec=node.spec.captured()) if isinstance(node.spec, CapturedDataFrame) else node
        for node in definition.graph.nodes
    )
    graph = Graph(nodes)
    plan = make_plan(graph, definition.plan.parallelism, definition.plan.max_parallelism)
    return replace(definition, graph=graph, plan=plan)


def announce(definition: PipelineDefinition, watcher: Observer) -> None:
    """Note where checkpoints and streams are: the default places depend on the working directory."""
    config = definition.config
    stores = sorted({str(node.spec.store) for node in definition.graph.nodes if hasattr(node.spec, "store")})
    streams = f", streams in {' and '.join(stores)}" if stores else ""
    mode = config.checkpoints.mode.value.replace("_", " ")
    watcher.on_note(f"checkpoints in {config.checkpoint_root}{streams}; records count {mode}{_removed_when(config)}")
    for note in outage_notes(definition):
        watcher.on_note(note)
    others = remember_pipeline(config.name, config.checkpoint_root)
    if others:
        places = " and in ".join(others)
        watcher.on_note(f"a pipeline of the same name has its checkpoints in {places}; this run does not continue it")


def outage_notes(definition: PipelineDefinition) -> list[str]:
    """Return how long an outage may last, for each sink whose target ends transactions by itself (CS9)."""
    sinks = [node for node in definition.graph.nodes if node.role is Role.SINK]
    found = [(node.name, transaction_timeout_ms(cast(Sink, node.spec))) for node in sinks]
    return [
        f"sink '{name}' survives an outage of {duration_text(timeout_ms)}; after a longer one, in which its target "
        "dropped output, the pipeline stops"
        for name, timeout_ms in found
        if timeout_ms is not None
    ]


def _removed_when(config: PipelineConfig) -> str:
    """Return when the checkpoints do not stay, as the end of a sentence (C70)."""
    checkpoints = config.checkpoints
    ends = {"is cancelled": checkpoints.retain_on_cancel, "has failed for good": checkpoints.retain_on_failure}
    removed = [end for end, retains in ends.items() if not retains]
    return f"; the checkpoints are removed when it {' or '.join(removed)}" if removed else ""


def _moves(moved: object) -> Moves:
    """Return what was moved, with absolute paths; URLs as sources and sinks know them.

    Raises:
        UsageError: it is no mapping from places to places.
    """
    if not isinstance(moved, Mapping) or not all(isinstance(one, str | os.PathLike) for one in _both(moved)):
        raise UsageError(
            f"moved must map former places to those of now, such as {{'/old/in': '/new/in'}}, not {moved!r}"
        )
    moves = [(_place(before), _place(now)) for before, now in moved.items()]
    bare = [(before.partition("://")[2], now.partition("://")[2]) for before, now in moves if "://" in before]
    named = [(str(before), str(now)) for before, now in moved.items() if ":" in str(before)]
    # files below a URL are listed without its scheme; what is no file has a name such as kafka:orders
    return (*moves, *((before, now) for before, now in bare if now), *(one for one in named if one not in moves))


def _both(moved: Mapping[object, object]) -> list[object]:
    return [*moved.keys(), *moved.values()]


def _place(given: str | os.PathLike[str]) -> str:
    text = os.fspath(given)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _location(config: PipelineConfig, restore: Restorable | None) -> str | None:
    if restore is None:
        return None
    if isinstance(restore, int):
        _check_id(restore, "restore")
        return f"{config.checkpoint_root.rstrip('/')}/{config.name}/chk-{restore}"
    return absolute_location(restore)


def _check_id(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(
            f"{what} must be the id of a checkpoint, not {value!r}; headgate checkpoints list NAME shows them"
        )
