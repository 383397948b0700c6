"""A pipeline: its name, its configuration, its graph; and running it.

Counterparts: ``headgate.api.stream`` (the verbs), ``headgate.spark.session`` (which runs the definition).
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from headgate.api.builder import GraphBuilder, check_name
from headgate.api.config import (
    BadRecords,
    Checkpointing,
    DeadLetter,
    ExponentialDelay,
    Fail,
    FailureRate,
    FixedDelay,
    NoRestart,
    Restart,
)
from headgate.api.describe import describe_plan
from headgate.api.guarantees import check_guarantee, check_overtaking, check_retention, check_transactions, policy_for
from headgate.api.homes import remember
from headgate.api.not_yet import not_there_yet, refuse_lists, refuse_unheard
from headgate.api.placed import CapturableSource, PlacedSource
from headgate.api.running import LoggingObserver, refuse_while_loading, run_to_end
from headgate.api.security import Security
from headgate.api.starting import Restorable, start_config
from headgate.api.state import Memory, RocksDB, StateChoice
from headgate.api.stream import Stream
from headgate.connectors.base import Source
from headgate.connectors.hooks import CoordinatorHook, HookedSource
from headgate.connectors.induced import InducedSource
from headgate.connectors.memory import Discard
from headgate.errors import UsageError
from headgate.model.config import (
    LOOP_DISK_BYTES_MAX,
    LOOP_MEMORY_BYTES,
    DamagedCheckpoint,
    Duration,
    PipelineConfig,
    RocksState,
    RuntimeConfig,
    duration_ms,
)
from headgate.model.definition import HookSpec, PipelineDefinition
from headgate.model.graph import Edge, Graph, Role
from headgate.model.ids import NodeName
from headgate.model.key_groups import MAX_PARALLELISM_DEFAULT, MAX_PARALLELISM_MAX
from headgate.model.plan import make_plan
from headgate.model.progress import Observer, PipelineHandle, RunResult
from headgate.operators import bad_records
from headgate.operators.types import canonical_schema
from headgate.state.rocksdb.limits import refuse_expiring
from headgate.storage.backends import absolute_location, local_directory
from headgate.storage.roots import make_root

PARALLELISM_DEFAULT = 2
"""On local Spark, when neither the pipeline nor the master says otherwise."""

HOOK_TIMEOUT: Duration = "10s"

_LOCAL_MASTER = re.compile(r"local(?:\[(\d+|\*)(?:,\s*\d+)?\])?")


class Pipeline:
    """Sources, operators and sinks under one name.

    The name identifies the pipeline's checkpoints: running the same name again continues where it stopped.
    """

    def __init__(
        self,
        name: str,
        *,
        parallelism: int | None = None,
        checkpointing: Checkpointing | None = None,
        restart: Restart | None = None,
        bad_records: BadRecords | None = None,
        max_parallelism: int = MAX_PARALLELISM_DEFAULT,
        on_damaged_checkpoint: str | None = None,
        state: StateChoice | None = None,
        state_backend: str = "memory",
        loop_memory_bytes: int = LOOP_MEMORY_BYTES,
        loop_disk_bytes_max: int = LOOP_DISK_BYTES_MAX,
        security: Security | None = None,
    ) -> None:
        """Configure; nothing is started or written.

        Args:
            name: letters, digits, '.', '_' and '-'.
            parallelism: subtasks of every operator; default is the master's slots, on local Spark 2.
            checkpointing: where checkpoints are kept and how they are taken.
            restart: what happens after a failure; default is ``ExponentialDelay()``.
            bad_records: ``Fail()`` (default) or ``DeadLetter(sink)``.
            max_parallelism: number of key groups; fixed for the life of the pipeline.
            on_damaged_checkpoint: "previous" restores the one before a damaged checkpoint, which repeats output that
                was committed since; "fail" does not start. Default: "fail" if a sink is transactional (all but
                ``Discard`` and ``Print``), else "previous".
            state: where keyed state is kept: ``Memory()`` (default) or ``RocksDB()``; each start may choose anew.
            state_backend: "memory"; an older name of what ``state`` says.
            loop_memory_bytes: what the loops of one worker keep in memory of the records that circulate; beyond it
                they go to disk, and new input of the loops waits.
            loop_disk_bytes_max: what they may take on disk; beyond it the pipeline fails.
            security: who may read what the pipeline writes; default is ``Security()``.

        Raises:
            UsageError: a value is wrong.
        """
        self.name = check_name(name, "a pipeline")
        self._max_parallelism = _whole(max_parallelism, MAX_PARALLELISM_MAX, "max_parallelism")
        self._parallelism = None if parallelism is None else self._checked_parallelism(parallelism)
        self._checkpointing: Checkpointing = _instance(checkpointing or Checkpointing(), Checkpointing, "checkpointing")
        self._restart = _instance(
            restart or ExponentialDelay(), (NoRestart, FixedDelay, ExponentialDelay, FailureRate), "restart"
        ).to_config()
        self._bad_records = _checked_policy(bad_records or Fail())
        self._on_damaged = None if on_damaged_checkpoint is None else _damaged_policy(on_damaged_checkpoint)
        if state_backend != "memory":
            raise UsageError(
                f"state_backend={state_backend!r} is not known: give state=headgate.Memory() or "
                "state=headgate.RocksDB(memory='2GB')"
            )
        self._state = _instance(state or Memory(), (Memory, RocksDB), "state").to_config()
        self._runtime = RuntimeConfig(
            loop_memory_bytes=_bytes(loop_memory_bytes, "loop_memory_bytes"),
            loop_disk_bytes_max=_bytes(loop_disk_bytes_max, "loop_disk_bytes_max"),
        )
        self._security = _instance(security or Security(), Security, "security").to_config()
        self._builder = GraphBuilder()
        self._hooks: dict[str, HookSpec] = {}
        self._forgotten_hooks: set[str] = set()
        self._announces = True
        self._begins: tuple[Restorable | None, int | None, Sequence[str]] = (None, None, ())

    def __repr__(self) -> str:
        return f"Pipeline({self.name!r}, {len(self._builder.nodes)} operators)"

    def source(self, source: Source | InducedSource, *, name: str | None = None) -> Stream:
        """Begin a stream.

        Args:
            source: what to read, for example ``StreamSource("app/logs")`` or ``DataFrameSource(df)``.
            name: of the operator; default "source".

        Raises:
            UsageError: it is not a source, or cannot be read.
        """
        if not (callable(getattr(source, "open", None)) and callable(getattr(source, "schema", None))):
            raise UsageError(
                f"a source such as headgate.TextFiles('logs/') is needed, not {type(source).__name__}; "
                "a Spark DataFrame is wrapped as headgate.DataFrameSource(df), rows as headgate.FromRows(rows)"
            )
        node = self._builder.claim_name("source", name)
        refuse_unheard(f"source '{node}'", source)
        try:
            schema = canonical_schema(source.schema())
        except UsageError as error:
            raise UsageError(f"operator '{node}': {error.message}") from None
        hook = source.coordinator_hook() if isinstance(source, HookedSource) else None
        if hook is not None:
            self.add_hook(str(node), hook)
        self._builder.add(node, Role.SOURCE, (), source, schema, state_text=source.identity(), refuses=True)
        return Stream(self, (Edge(node),), schema)

    def add_hook(self, name: str, hook: CoordinatorHook, *, timeout: Duration = HOOK_TIMEOUT) -> None:
        """Have an external system take part in checkpoints: it takes a snapshot of its own, and goes back with it.

        Args:
            name: of the hook; a checkpoint holds what the hook returned under this name.
            hook: called in the driver.
            timeout: of each call; a checkpoint whose ``trigger`` takes longer is aborted, which counts as a failure.

        Raises:
            UsageError: it is not a hook, the name is taken, or the timeout is not positive.
        """
        check_name(name, "a hook")
        if not isinstance(hook, CoordinatorHook):
            raise UsageError(f"hook '{name}' must be an instance of a headgate.CoordinatorHook, not {hook!r}")
        refuse_unheard(f"hook '{name}'", hook)
        refuse_lists(f"hook '{name}'", hook)
        if name in self._hooks:
            raise UsageError(f"two hooks are named '{name}'; a source brings its hook under its own name")
        timeout_ms = duration_ms(timeout, f"timeout of hook '{name}'")
        if timeout_ms == 0:
            raise UsageError(f"timeout of hook '{name}' must be positive")
        self._hooks[name] = HookSpec(name, hook, timeout_ms)

    def forget_hook(self, name: str) -> None:
        """Say that what old checkpoints hold of a hook that is no longer there does not matter."""
        self._forgotten_hooks.add(check_name(name, "a hook"))

    def definition(self, parallelism: int | None = None) -> PipelineDefinition:
        """Return what runs; ``parallelism`` counts where the pipeline leaves it open.

        Raises:
            UsageError: there is no sink, a stream leads nowhere, parallelism is out of range.
        """
        subtasks = self._parallelism or parallelism or PARALLELISM_DEFAULT
        sink = self._bad_records.sink if isinstance(self._bad_records, DeadLetter) else None
        graph, outputs = self._builder.finished(sink)
        checkpoints = self._checkpointing.to_config()
        mode = checkpoints.mode
        check_guarantee(graph, mode, self._on_damaged)
        if checkpoints.alignment_timeout_ms is not None:
            check_overtaking(graph)
        check_retention(graph, checkpoints, self._hooks.values())
        check_transactions(graph, checkpoints)
        config = PipelineConfig(
            name=self.name,
            parallelism=self._checked_parallelism(subtasks),
            checkpoint_root=self._checkpointing.root(),
            max_parallelism=self._max_parallelism,
            checkpoints=checkpoints,
            restart=self._restart,
            on_damaged=self._on_damaged or policy_for(graph, mode),
            runtime=self._runtime,
            security=self._security,
            state=self._state,
        )
        if isinstance(self._state, RocksState):
            for node in graph.nodes:
                refuse_expiring(str(node.name), getattr(node.spec, "descriptors", ()))
        graph = _placed(graph, config)
        plan = make_plan(graph, config.parallelism, config.max_parallelism)
        hooks, forgotten = tuple(self._hooks.values()), frozenset(self._forgotten_hooks)
        derived = frozenset(str(name) for name in self._builder.derived)
        return PipelineDefinition(config, graph, plan, outputs, sink is not None, hooks, forgotten, derived)

    def definition_on(self, master: str | None, *, spark: Any = None) -> PipelineDefinition:
        """Return what ``start`` would run there.

        Raises:
            UsageError: see ``definition``.
        """
        return self.definition(self._parallelism or _slots(master, spark))

    def override(self, *, parallelism: int | None = None, checkpoint_dir: str | None = None) -> None:
        """Replace what the program says (the command line's options); None keeps it.

        Raises:
            UsageError: parallelism is out of range.
        """
        if parallelism is not None:
            self._parallelism = self._checked_parallelism(parallelism)
        if checkpoint_dir is not None:
            self._checkpointing = replace(self._checkpointing, dir=absolute_location(checkpoint_dir))

    def begin_with(
        self, restore: Restorable | None, go_back_behind: int | None, allow_unclaimed_state: Sequence[str]
    ) -> None:
        """Say what starts begin with that say nothing themselves (the command line's options)."""
        self._begins = (restore, go_back_behind, allow_unclaimed_state)

    def describe(self) -> str:
        """Return the plan as text: the chains that run in one thread, and what flows between them."""
        return describe_plan(self.definition())

    def start(
        self,
        master: str | None = None,
        *,
        spark: Any = None,
        observer: Observer | None = None,
        restore: Restorable | None = None,
        go_back_behind: int | None = None,
        allow_unclaimed_state: Sequence[str] = (),
    ) -> PipelineHandle:
        """Start and return at once.

        Args:
            master: a Spark master's URL; default is the active SparkSession, else local Spark.
            spark: the SparkSession to use.
            observer: gets progress; default logs restarts and notes to the logger ``headgate``.
            restore: where a pipeline without checkpoints of its own begins: at a savepoint, or at the checkpoints of a
                pipeline (``DIR/NAME``, or one of them, ``DIR/NAME/chk-ID``). Started again with the same place, it goes
                on from its own newest checkpoint. An id is one of the pipeline's own.
            go_back_behind: the pipeline's newest checkpoint, if it may leave that one, and repeat what was committed
                since, for ``restore``.
            allow_unclaimed_state: names of operators that are gone, whose state is left behind.

        Raises:
            UsageError: wrong pipeline, missing Java, too few slots, another driver runs this pipeline.
        """
        refuse_while_loading(self)
        from headgate.spark.session import start_pipeline

        definition = self.definition_on(master, spark=spark)
        given = (restore, go_back_behind, allow_unclaimed_state)
        begins = start_config(definition.config, *(self._begins if given == (None, None, ()) else given))
        definition = replace(definition, config=replace(definition.config, start=begins))
        make_checkpoint_directory(definition.config)
        for node in definition.graph.nodes:
            if isinstance(node.spec, CapturableSource):
                spark = _captured(node.name, node.spec) or spark
        definition = _with_captured(definition)
        watcher = LoggingObserver(self.name) if observer is None else observer
        if self._announces:
            _announce(definition, watcher)
        handle: PipelineHandle = start_pipeline(definition, spark=spark, master=master, observer=watcher)
        return handle

    def run(
        self,
        master: str | None = None,
        *,
        spark: Any = None,
        observer: Observer | None = None,
        restore: Restorable | None = None,
        go_back_behind: int | None = None,
        allow_unclaimed_state: Sequence[str] = (),
    ) -> RunResult:
        """Run until bounded input ends, or until Ctrl-C or SIGTERM stops it after a last checkpoint.

        SIGUSR1 drains it: reading stops, everything in flight is processed, and the pipeline has finished. The
        arguments are those of ``start``.

        Raises:
            PipelineFailed: the restart strategy gave up.
            UsageError, FencedError: see ``start``.
        """
        begins: dict[str, Any] = {
            "restore": restore,
            "go_back_behind": go_back_behind,
            "allow_unclaimed_state": allow_unclaimed_state,
        }
        return run_to_end(lambda: self.start(master, spark=spark, observer=observer, **begins))

    def add_listener(self, *args: object, **options: object) -> NoReturn:
        """Checkpoint listeners are not there yet."""
        not_there_yet("a checkpoint listener")

    def _checkpoint_root(self) -> str:
        """Return the checkpoint directory as an absolute path or URL."""
        return self._checkpointing.root()

    def _explored(self, edges: tuple[Edge, ...], root: str, interval: Duration | None) -> Pipeline:
        """Return a pipeline of what ``edges`` need (N42), to be run by itself: with its checkpoints in ``root``.

        Bad records go where this one's would fail it, or nowhere (N44). ``interval`` None keeps this one's.
        """
        self._builder.refuse_in_a_body()
        self._builder.explored.update(edge.upstream for edge in edges)
        checkpointing = replace(
            self._checkpointing,
            dir=root,
            interval=interval or self._checkpointing.interval,
            retain_on_cancel=True,  # the whole directory goes anyway
            retain_on_failure=True,
        )
        made = copy.copy(self)
        made._builder = _unhooked(self._builder.upstream_of(edge.upstream for edge in edges))
        made._hooks = {}  # EI13: who only looks leaves everything outside as it is
        made._checkpointing = checkpointing
        made._announces = False
        made._bad_records = Fail() if isinstance(self._bad_records, Fail) else DeadLetter(Discard())
        return made

    def _checked_parallelism(self, parallelism: int) -> int:
        return _whole(parallelism, self._max_parallelism, "parallelism")


def _unhooked(builder: GraphBuilder) -> GraphBuilder:
    """Return ``builder`` with sources that do without the hooks they would bring along."""
    builder.nodes = [
        replace(node, spec=node.spec.without_hook()) if isinstance(node.spec, HookedSource) else node
        for node in builder.nodes
    ]
    return builder


def _placed(graph: Graph, config: PipelineConfig) -> Graph:
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


def _announce(definition: PipelineDefinition, watcher: Observer) -> None:
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


def _captured(name: NodeName, source: CapturableSource) -> Any:
    try:
        return source.capture()
    except UsageError as error:
        raise UsageError(f"operator '{name}': {error.message}") from None


def _with_captured(definition: PipelineDefinition) -> PipelineDefinition:
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


def _slots(master: str | None, spark: Any) -> int | None:
    """Return the slots of the session or master that the pipeline will run on; None where local Spark is ours.

    Raises:
        UsageError: only the cluster itself knows.
    """
    from headgate.spark.dataframes import active_session

    session = spark if spark is not None else active_session()
    if session is not None:
        return int(session.sparkContext.defaultParallelism)
    url = master or os.environ.get("HEADGATE_MASTER")
    if url is None:
        return None
    match = _LOCAL_MASTER.fullmatch(url)
    if match is None:
        raise UsageError(f"say with parallelism= (or --parallelism) how many slots of {url} the pipeline shall use")
    if match.group(1) == "*":
        return os.cpu_count() or 1
    return int(match.group(1) or 1)


def _bytes(value: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{what} must be a number of bytes, 0 or more, but is {value!r}")
    return value


def _whole(value: int, most: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UsageError(f"{what} must be an integer between 1 and {most}, but is {value!r}")
    return value


def _instance(value: Any, kinds: Any, what: str) -> Any:
    if not isinstance(value, kinds):
        names = [kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
        raise UsageError(f"{what}= must be {' or '.join(f'headgate.{name}(...)' for name in names)}, not {value!r}")
    return value


def _checked_policy(policy: BadRecords) -> BadRecords:
    _instance(policy, (Fail, DeadLetter), "bad_records")
    if isinstance(policy, DeadLetter):
        try:
            policy.sink.check(canonical_schema(bad_records.SCHEMA))
        except UsageError as error:
            raise UsageError(f"bad_records: {error.message}") from None
    return policy


def _damaged_policy(policy: str) -> DamagedCheckpoint:
    try:
        return DamagedCheckpoint(policy)
    except ValueError:
        raise UsageError(f"on_damaged_checkpoint must be 'previous' or 'fail', not {policy!r}") from None
