"""A pipeline: its name, its configuration, its graph; and running it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from headgate.api.config import (
    AUTO,
    BadRecords,
    Checkpointing,
    DeadLetter,
    ExponentialDelay,
    Fail,
    Memory,
    Restart,
    Security,
    StateChoice,
    checked_bad_records,
    checked_damage_policy,
    checked_denial_policy,
    checked_restart,
    checked_runtime,
    instance,
    state_config,
    whole,
)
from headgate.api.dataframe_source import DataFrameSource, check_captures
from headgate.api.foreground import (
    LoggingObserver,
    refuse_while_loading,
    run_to_end,
    show_in_notebook,
    start_with_metrics,
)
from headgate.api.graph_builder import GraphBuilder, check_name, leave_out_shuffles, read_used_columns
from headgate.api.launch import (
    NO_MOVES,
    START_DEFAULT,
    Restorable,
    StartOptions,
    announce,
    available_slots,
    check_master,
    place_sources,
    prepare_start,
)
from headgate.api.lineage import lineages_of
from headgate.api.streams.changes import Changes
from headgate.api.streams.stream import Stream
from headgate.api.unsupported import PIPELINE_HINTS, raise_no_attribute, refuse_operator_state, refuse_uncalled_methods
from headgate.api.validation import (
    check_guarantee,
    check_overtaking,
    check_owners,
    check_retention,
    check_transactions,
    policy_for,
)
from headgate.connectors.base import HOOK_TIMEOUT, CoordinatorHook, Source, check_is_source
from headgate.connectors.hybrid import Hybrid
from headgate.connectors.memory import Discard
from headgate.display.html import NODES_MAX, graph_svg, pipeline_html
from headgate.errors import UsageError
from headgate.model.config import (
    LOOP_DISK_BYTES_MAX,
    LOOP_MEMORY_BYTES,
    Duration,
    PipelineConfig,
    check_switches,
    duration_ms,
)
from headgate.model.graph import MAIN, Edge, Node, Partitioner, Role
from headgate.model.ids import MAX_PARALLELISM_DEFAULT, MAX_PARALLELISM_MAX
from headgate.model.plan import HookSpec, PipelineDefinition, PlanEdge, make_plan
from headgate.model.progress import Observer, PipelineHandle, RunResult
from headgate.operators.loop_head import LoopHeadSpec
from headgate.operators.schemas import canonical_schema
from headgate.plain_text import printable
from headgate.spark.py_files import Submission
from headgate.storage.urls import absolute_location
from headgate.tracebacks import install_excepthook

PARALLELISM_DEFAULT = 2
"""On local Spark, when neither the pipeline nor the master says otherwise."""

METRICS_HOST = "127.0.0.1"


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
        on_denied_output: str = "fail",
        state: StateChoice | None = None,
        loop_memory_bytes: int = LOOP_MEMORY_BYTES,
        loop_disk_bytes_max: int = LOOP_DISK_BYTES_MAX,
        security: Security | None = None,
        max_drift: Duration | None = AUTO,
    ) -> None:
        """Configure; nothing is started or written.

        Args:
            name: letters, digits, '.', '_' and '-'.
            parallelism: subtasks of every operator; default is the master's slots, on local Spark 2.
            checkpointing: where checkpoints are kept and how they are taken.
            restart: what happens after a failure; default is ``ExponentialDelay()``.
            bad_records: ``Fail()`` (default) or ``DeadLetter(sink)``.
            max_parallelism: number of key groups; fixed for the life of the pipeline.
            on_damaged_checkpoint: "previous" goes back to the checkpoint before a damaged one, which repeats output
                that was committed since; "fail" refuses to start. Default: "fail" if a sink is transactional (all but
                ``Discard`` and ``Print``), else "previous".
            on_denied_output: "fail" (default) stops if a target has lost output that a completed checkpoint promised;
                "lose" continues without it, reports the loss, counts it, and records it next to the checkpoints.
            state: where keyed state is kept: ``Memory()`` (default) or ``RocksDB()``. Each start may choose again.
            loop_memory_bytes: how many bytes of circulating records the loops of one worker keep in memory. Beyond
                that, records go to disk, and new input of the loops waits.
            loop_disk_bytes_max: how many bytes they may take on disk; beyond that, the pipeline fails.
            security: permissions and encryption; default is ``Security()``.
            max_drift: how far, in event time, a split of a source may be ahead of the slowest one; it
                waits if it is further ahead. "auto" (default): about two batches. None: none waits.

        Raises:
            UsageError: a value is wrong.
        """
        install_excepthook()
        self.name = check_name(name, "a pipeline")
        self._max_parallelism = whole(max_parallelism, MAX_PARALLELISM_MAX, "max_parallelism")
        self._parallelism = None if parallelism is None else self._checked_parallelism(parallelism)
        self._checkpointing: Checkpointing = instance(checkpointing or Checkpointing(), Checkpointing, "checkpointing")
        self._restart = checked_restart(restart or ExponentialDelay())
        self._bad_records = checked_bad_records(bad_records or Fail())
        self._on_damaged = None if on_damaged_checkpoint is None else checked_damage_policy(on_damaged_checkpoint)
        self._on_denied = checked_denial_policy(on_denied_output)
        self._state = state_config(state or Memory())
        self._runtime = checked_runtime(loop_memory_bytes, loop_disk_bytes_max, max_drift)
        self._security = instance(security or Security(), Security, "security").to_config()
        self._builder = GraphBuilder()
        self._hooks: dict[str, HookSpec] = {}
        self._forgotten_hooks: set[str] = set()
        self._announces = True
        self._submission = Submission()
        self._begins = START_DEFAULT
        self._leave: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Pipeline({self.name!r}, {len(self._builder.nodes)} operators)"

    def _repr_html_(self) -> str:
        return pipeline_html(self.name, self._pictured())

    def _repr_svg_(self) -> str | None:
        nodes = self._pictured()
        return graph_svg(nodes, is_standalone=True) if 0 < len(nodes) <= NODES_MAX else None

    def source(self, source: Source, *, rate_limit: float | None = None, name: str | None = None) -> Stream:
        """Begin a stream.

        Args:
            source: what to read, for example ``StreamSource("app/logs")`` or ``DataFrameSource(df)``.
            rate_limit: how many records per second are read, in all subtasks together. None: as fast as possible.
            name: name of the operator; default "source".

        Raises:
            UsageError: ``source`` is not a source, or cannot be read.
        """
        check_is_source(source)
        node = self._builder.claim_name("source", name)
        refuse_uncalled_methods(f"source '{node}'", source)
        if isinstance(source, Hybrid) and any(isinstance(one, DataFrameSource) for one in source.sources):
            raise UsageError(
                f"operator '{node}': a DataFrame cannot be part of Hybrid; write it to Parquet files, and give "
                "headgate.ParquetFiles(...)"
            )
        try:
            schema = canonical_schema(source.schema())
        except UsageError as error:
            raise UsageError(f"operator '{node}': {error.message}") from None
        except UnicodeEncodeError as error:
            name = printable(error.object)
            raise UsageError(
                f"operator '{node}': the name '{name}' of a column has characters that are not Unicode; rename it"
            ) from None
        is_number = isinstance(rate_limit, int | float) and not isinstance(rate_limit, bool)
        if rate_limit is not None and not (is_number and 0 < rate_limit < float("inf")):
            raise UsageError(
                f"operator '{node}': rate_limit must be a positive number of records per second, not {rate_limit!r}"
            )
        hook = source.coordinator_hook()
        if hook is not None:
            self.add_hook(str(node), hook, timeout=hook.timeout)
        self._builder.add(
            node, Role.SOURCE, (), source, schema, state_text=source.identity(), refuses=True, rate_limit=rate_limit
        )
        found = source.changes()
        return Stream(self, (Edge(node),), schema, changes=None if found is None else Changes(*found))

    def add_hook(self, name: str, hook: CoordinatorHook, *, timeout: Duration = HOOK_TIMEOUT) -> None:
        """Let an external system take part in checkpoints: it takes its own snapshots and goes back to them.

        Args:
            name: the name of the hook, under which a checkpoint stores the data that the hook returns.
            hook: the hook, which is called in the driver.
            timeout: the time limit of each call. A checkpoint is aborted
                if its ``trigger`` takes longer, which counts as a failure.

        Raises:
            UsageError: ``hook`` is not a hook, the name is taken, or the timeout is not positive.
        """
        spec = hook_spec(name, hook, timeout)
        if name in self._hooks:
            raise UsageError(f"two hooks are named '{name}'; a source brings its hook under its own name")
        self._hooks[name] = spec

    def forget_hook(self, name: str) -> None:
        """Ignore the data that old checkpoints hold of a hook that the program no longer has."""
        self._forgotten_hooks.add(check_name(name, "a hook"))

    def definition(self, parallelism: int | None = None) -> PipelineDefinition:
        """Return the definition that runs. ``parallelism`` applies if the pipeline does not set its own.

        Raises:
            UsageError: there is no sink, a stream leads nowhere, parallelism is out of range.
        """
        subtasks = self._parallelism or parallelism or PARALLELISM_DEFAULT
        letters = self._bad_records if isinstance(self._bad_records, DeadLetter) else None
        sink = None if letters is None else letters.sink
        graph, outputs = self._builder.finished(sink, letters is not None and letters.exceptions)
        if letters is None:
            graph, outputs = read_used_columns(graph, outputs)
        graph = leave_out_shuffles(graph)
        checkpoints = self._checkpointing.to_config()
        mode = checkpoints.mode
        check_guarantee(graph, mode, self._on_damaged)
        if checkpoints.alignment_timeout_ms is not None:
            check_overtaking(graph)
        check_retention(graph, checkpoints, self._hooks.values())
        check_transactions(graph, checkpoints, self._restart)
        check_owners(graph)
        config = PipelineConfig(
            name=self.name,
            parallelism=self._checked_parallelism(subtasks),
            checkpoint_root=self._checkpointing.root(),
            max_parallelism=self._max_parallelism,
            checkpoints=checkpoints,
            restart=self._restart,
            on_damaged=self._on_damaged or policy_for(graph, mode),
            on_denied=self._on_denied,
            runtime=self._runtime,
            security=self._security,
            state=self._state,
            operator_states=tuple((str(node), state) for node, state in self._builder.states.items()),
        )
        graph = place_sources(graph, config)
        plan = make_plan(graph, config.parallelism, config.max_parallelism)
        hooks, forgotten = tuple(self._hooks.values()), frozenset(self._forgotten_hooks)
        derived = frozenset(str(name) for name in self._builder.derived)
        check_captures(graph, derived)
        lineages = lineages_of(graph, derived)
        return PipelineDefinition(
            config, graph, plan, outputs, sink is not None, hooks, forgotten, derived, lineages=lineages
        )

    def definition_on(self, master: str | None, *, spark: Any = None) -> PipelineDefinition:
        """Return the definition that ``start`` would run with these arguments.

        Raises:
            UsageError: see ``definition``; or ``master`` is malformed, or is not where the session is.
        """
        check_master(master, spark)
        return self.definition(self._parallelism or available_slots(master, spark))

    def override(self, *, parallelism: int | None = None, checkpoint_dir: str | None = None) -> None:
        """Replace settings of the program with options of the command line; None keeps a setting.

        Raises:
            UsageError: parallelism is out of range.
        """
        if parallelism is not None:
            self._parallelism = self._checked_parallelism(parallelism)
        if checkpoint_dir is not None:
            self._checkpointing = replace(self._checkpointing, dir=absolute_location(checkpoint_dir))

    def begin_with(
        self,
        restore: Restorable | None,
        go_back_past: int | None,
        allow_unclaimed_state: Sequence[str],
        moved: Mapping[str, str],
        leave: Sequence[str] = (),
    ) -> None:
        """Set how ``start`` begins if its caller does not say (options of the command line).

        ``leave``: sinks that a start over leaves as they are.
        """
        self._begins, self._leave = (restore, go_back_past, allow_unclaimed_state, moved), tuple(leave)

    def submit_with(self, submission: Submission) -> None:
        """Set what ``start`` passes to Spark beside the pipeline (options of the command line)."""
        self._submission = submission

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
        go_back_past: int | None = None,
        allow_unclaimed_state: Sequence[str] = (),
        moved: Mapping[str, str] = NO_MOVES,
        fresh: bool = False,
        metrics_port: int | None = None,
        metrics_host: str = METRICS_HOST,
        metrics_push: str | None = None,
    ) -> PipelineHandle:
        """Start and return at once.

        Args:
            master: a Spark master's URL; default is the active SparkSession, else local Spark.
            spark: the SparkSession to use.
            observer: gets progress; default logs restarts and notes to the logger ``headgate``.
            restore: where to start: a savepoint, or a checkpoint of a pipeline (``DIR/NAME`` for the newest, or
                ``DIR/NAME/chk-ID``), or the id of one of the pipeline's own checkpoints. If the pipeline is started
                again with the same value, it continues from its own newest checkpoint.
            go_back_past: id of the pipeline's newest checkpoint. Allows ``restore`` to go back to an older
                one, so that output that was committed since is repeated.
            allow_unclaimed_state: names of removed operators; their state is dropped.
            moved: directories and files that sources read and sinks write, and that are elsewhere now, each with its
                new place. What is there is taken for what was at the former place.
            fresh: start over: delete the pipeline's checkpoints and everything that it has written to its sinks, all or
                nothing, and begin at the beginning.
            metrics_port: the port where Prometheus fetches the metrics of this run until it has ended; 0 takes a free
                one, and a note says which.
            metrics_host: the address of that port; by default only this machine can reach it.
            metrics_push: an OpenTelemetry collector to which metrics are sent, such as ``http://localhost:4318``.

        Raises:
            UsageError: wrong pipeline, missing Java, too few slots, another driver runs this pipeline, the port is
                taken.
        """
        refuse_while_loading(self)
        watcher = LoggingObserver(self.name) if observer is None else observer

        def start() -> PipelineHandle:
            begins = (restore, go_back_past, allow_unclaimed_state, moved)
            return self._start(master, spark, watcher, begins, fresh)

        return start_with_metrics(metrics_port, metrics_host, metrics_push, self.name, watcher, start)

    def _start(
        self,
        master: str | None,
        spark: Any,
        watcher: Observer,
        begins: StartOptions,
        fresh: bool,
    ) -> PipelineHandle:
        from headgate.spark.session import check_cluster, start_pipeline

        check_switches("start: ", fresh=fresh)
        made = self.definition_on(master, spark=spark)
        submission = self._submission
        check = partial(check_cluster, self.name, made.plan.parallelism, spark, master, submission.conf)
        definition, found = self._ready(made, watcher, begins, check if fresh else None)
        handle: PipelineHandle = start_pipeline(
            definition, spark=found or spark, master=master, observer=watcher, submission=submission
        )
        return handle

    def start_with(
        self,
        starter: Callable[[PipelineDefinition, Observer], PipelineHandle],
        *,
        checkpoint_dir: str,
        parallelism: int | None = None,
        observer: Observer | None = None,
        restore: Restorable | None = None,
        go_back_past: int | None = None,
        allow_unclaimed_state: Sequence[str] = (),
        moved: Mapping[str, str] = NO_MOVES,
        fresh: bool = False,
    ) -> PipelineHandle:
        """Start without Spark, for ``headgate.testing.run``.

        Args:
            starter: starts what the pipeline defines.
            checkpoint_dir: where checkpoints are kept if the pipeline does not say.
            parallelism: instead of what the pipeline says.
            observer: see ``start``, as for all that follow.
            restore: see ``start``.
            go_back_past: see ``start``.
            allow_unclaimed_state: see ``start``.
            moved: see ``start``.
            fresh: see ``start``.

        Raises:
            UsageError: wrong pipeline, or another driver runs it.
        """
        refuse_while_loading(self)
        check_switches("start_with: ", fresh=fresh)
        made = copy.copy(self)
        made.override(parallelism=parallelism)  # instead of what the program says
        if made._checkpointing.dir is None:  # only if the program does not say
            made.override(checkpoint_dir=checkpoint_dir)
        made._announces = False
        watcher = LoggingObserver(self.name) if observer is None else observer
        begins = (restore, go_back_past, allow_unclaimed_state, moved)
        definition, _ = made._ready(made.definition(), watcher, begins, (lambda: None) if fresh else None)
        return starter(definition, watcher)

    def run(
        self,
        master: str | None = None,
        *,
        spark: Any = None,
        observer: Observer | None = None,
        restore: Restorable | None = None,
        go_back_past: int | None = None,
        allow_unclaimed_state: Sequence[str] = (),
        moved: Mapping[str, str] = NO_MOVES,
        fresh: bool = False,
        metrics_port: int | None = None,
        metrics_host: str = METRICS_HOST,
        metrics_push: str | None = None,
    ) -> RunResult:
        """Run until bounded input ends, or until Ctrl-C or SIGTERM stops it after a last checkpoint.

        SIGUSR1 drains it: reading stops, everything in flight is processed, and the pipeline has finished. The
        arguments are those of ``start``. In a notebook, the cell shows the progress of the run; interrupting the cell
        is like Ctrl-C.

        Raises:
            PipelineFailed: the restart strategy gave up.
            UsageError, FencedError: see ``start``.
        """
        begins: dict[str, Any] = {
            "restore": restore,
            "go_back_past": go_back_past,
            "allow_unclaimed_state": allow_unclaimed_state,
            "moved": moved,
            "fresh": fresh,
            "metrics_port": metrics_port,
            "metrics_host": metrics_host,
            "metrics_push": metrics_push,
        }
        return run_to_end(lambda: self.start(master, spark=spark, observer=observer, **begins), show_in_notebook)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise_no_attribute("Pipeline", name, PIPELINE_HINTS, dir(Pipeline))

    def _pictured(self) -> tuple[Node, ...]:
        """Return the nodes that would run; those that are there while the pipeline is incomplete."""
        letters = self._bad_records if isinstance(self._bad_records, DeadLetter) else None
        try:
            graph, _ = self._builder.finished(None if letters is None else letters.sink)
        except UsageError:
            return tuple(self._builder.nodes)
        return graph.nodes

    def _checkpoint_root(self) -> str:
        """Return the checkpoint directory as an absolute path or URL."""
        return self._checkpointing.root()

    def _explored(self, edges: tuple[Edge, ...], root: str, interval: Duration | None) -> Pipeline:
        """Return a pipeline of what ``edges`` need, to be run by itself: with its checkpoints in ``root``.

        Bad records go where this one's would fail it, or nowhere. ``interval`` None keeps this one's.
        """
        self._builder.refuse_in_loop_body()
        self._builder.explored.update(edge.upstream for edge in edges)
        checkpointing = replace(
            self._checkpointing,
            dir=root,
            interval=interval or self._checkpointing.interval,
            retain_on_cancel=True,  # the whole directory goes anyway
            retain_on_failure=True,
        )
        made = copy.copy(self)
        made._builder = self._builder.upstream_of(edge.upstream for edge in edges)
        made._builder.leave_hooks_out()
        made._hooks = {}  # who only looks leaves everything outside as it is
        made._checkpointing = checkpointing
        made._announces = False
        if isinstance(self._bad_records, DeadLetter):
            made._bad_records = replace(self._bad_records, sink=Discard())
        return made

    def _ready(
        self, definition: PipelineDefinition, watcher: Observer, given: StartOptions, fresh: Callable[[], None] | None
    ) -> tuple[PipelineDefinition, Any]:
        """Prepare a start; options of the command line apply where the call gives none."""
        begins = self._begins if given == START_DEFAULT else given
        found = prepare_start(definition, watcher, begins, fresh, self._leave)
        if self._announces:
            announce(found[0], watcher)
        return found

    def _checked_parallelism(self, parallelism: int) -> int:
        return whole(parallelism, self._max_parallelism, "parallelism")


def describe_plan(definition: PipelineDefinition) -> str:
    """Return one block per chain: its inputs, then its operators with their schemas.

    An operator names the side output that it reads within the chain, and the loops that it is in, outermost first.
    """
    config, plan = definition.config, definition.plan
    lines = [
        f"pipeline {config.name}: {len(plan.vertices)} chains, parallelism {config.parallelism}, "
        f"checkpoints in {config.checkpoint_root}"
    ]
    for vertex in plan.vertices:
        lines.append(f"chain {vertex.id}")
        lines += [f"  <- {_edge(edge)}" for edge in plan.edges if edge.target == vertex.id]
        lines += [f"  {_node(node, is_chained=node is not vertex.head)}" for node in vertex.nodes]
    return "\n".join(lines)


def _edge(edge: PlanEdge) -> str:
    tag = "" if edge.tag == MAIN else f" ({edge.tag})"
    how = edge.partitioner.value
    if edge.partitioner is Partitioner.HASH:
        how += f" on {', '.join(edge.keys)}"
    back = ", comes back" if edge.is_feedback else ""
    return f"{edge.from_node}{tag}, {how}{back}"


def _node(node: Node, is_chained: bool) -> str:
    tagged = [edge for edge in node.inputs if is_chained and edge.tag != MAIN]
    side = [f"from {' and '.join(f'{edge.upstream} ({edge.tag})' for edge in tagged)}"] if tagged else []
    return f"{node.name} [{', '.join([node.role.value, *side, *_facts(node)])}] {node.schema_text}"


def _facts(node: Node) -> list[str]:
    facts: list[str] = []
    if isinstance(node.spec, LoopHeadSpec):
        spec = node.spec
        facts += [f"by {', '.join(spec.keys)}"] if spec.keys else []
        facts += [f"rounds in {spec.round_column}"] if spec.round_column else []
        facts += [f"at most {spec.max_rounds}"] if spec.max_rounds else []
    elif node.state_text and node.role is Role.OPERATOR:
        facts.append("keeps state")
    around = [str(loop) for loop in node.loops if loop != node.name]
    return [*facts, f"in {' > '.join(around)}"] if around else facts


def hook_spec(name: str, hook: object, timeout: Duration) -> HookSpec:
    """Return ``hook`` as the driver calls it, each call for ``timeout`` at most.

    Raises:
        UsageError: it is not a hook, cannot have that name, or the timeout is not positive.
    """
    check_name(name, "a hook")
    if not isinstance(hook, CoordinatorHook):
        raise UsageError(f"hook '{name}' must be an instance of a headgate.CoordinatorHook, not {hook!r}")
    refuse_uncalled_methods(f"hook '{name}'", hook)
    refuse_operator_state(f"hook '{name}'", hook)
    timeout_ms = duration_ms(timeout, f"timeout of hook '{name}'")
    if timeout_ms == 0:
        raise UsageError(f"timeout of hook '{name}' must be positive")
    return HookSpec(name, hook, timeout_ms)
