"""Run a pipeline on Spark: find or make the context, check the cluster, start the driver, return the handle.

Counterparts: ``api.pipeline`` above, ``runtime.driver.driver`` below. The only place that creates a SparkContext.
It makes no SparkSession: workers need none, and loading Spark SQL was half of the JVM's work until the first record.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

from headgate import __version__
from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_CLOCK
from headgate.errors import UsageError
from headgate.model.failure import Failure
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import LogPlace, Observer, SilentObserver
from headgate.operators.user_functions import pickled
from headgate.runtime.driver.driver import Driver, DriverHandle, lock_for
from headgate.runtime.driver.restart import has_finished
from headgate.runtime.surroundings import modules_being_imported
from headgate.spark.class_archive import prepare_in_background
from headgate.spark.jvm import (
    discard_early,
    ensure_jvm,
    forget_dead_jvm,
    ignore_sigterm_in_jvm,
    jvm_settings,
    log_to,
    session_options,
    startup_errors,
)
from headgate.spark.launcher import SparkLauncher, job_error, warm_up
from headgate.spark.prerequisites import SUBMITTED, check_prerequisites, read_master, same_master
from headgate.spark.py_files import Submission, send_modules
from headgate.spark.worker_main import log_directory, spark_log

SLOTS_WAIT_S = 30.0
"""How long to wait for a cluster's executors to come up before the parallelism counts as too high."""


CONTEXT_LOCK = threading.RLock()
"""Held while a context is found, made or stopped: a process has one, and its threads may start and end pipelines."""


class PipelineContext:
    """A context that a pipeline made; those that start while it is there use it, too. The last one stops it."""

    current: ClassVar[PipelineContext | None] = None

    def __init__(self, context: Any) -> None:
        self._context = context
        self._users: set[object] = set()
        PipelineContext.current = self

    @classmethod
    def of(cls, context: Any) -> PipelineContext | None:
        """Return the one of ``context``; None: that is its user's."""
        own = cls.current
        return own if own is not None and own._context is context else None

    def use(self) -> Callable[[], None]:
        """Keep it for one more user; return what gives it back, and may be called again by any thread.

        When that returns, a context without users is stopped, whichever thread did it.
        """
        user = object()
        self._users.add(user)
        return functools.partial(self._give_back, user)

    def _give_back(self, user: object) -> None:
        with CONTEXT_LOCK:
            if user in self._users:
                self._users.remove(user)
                if not self._users:
                    # first: a start that waits for the lock makes a context of its own
                    PipelineContext.current = None
                    is_local = self._context.master.startswith("local")
                    _stop(self._context)
                    if is_local:
                        prepare_in_background(os.environ)


class SparkHandle(DriverHandle):
    """A pipeline that runs on Spark."""

    def __init__(self, driver: Driver, give_back: Callable[[], None] | None = None) -> None:
        """``give_back``: of its ``PipelineContext``; None: the context is its user's."""
        super().__init__(driver)
        self._give_back = give_back

    def _release(self) -> None:
        super()._release()  # first: its job runs in the context
        if self._give_back is not None:
            self._give_back()


class NullLauncher:
    """Launcher of a pipeline that has finished: a driver says so, and no Spark is needed for that."""

    def __init__(self) -> None:
        self._ended: dict[int, Callable[[Failure | None], None]] = {}

    def submit(
        self, submission: int, address: tuple[str, int], secret: bytes, ended: Callable[[Failure | None], None]
    ) -> None:
        """Start nothing."""
        assert submission not in self._ended, "each submission has a number of its own"
        self._ended[submission] = ended

    def cancel(self, submission: int) -> None:
        """Say that no worker is there any more."""
        ended = self._ended.pop(submission, None)
        if ended is not None:
            ended(None)


def start_pipeline(
    definition: PipelineDefinition,
    *,
    spark: Any = None,
    master: str | None = None,
    observer: Observer | None = None,
    submission: Submission | None = None,
) -> SparkHandle:
    """Start ``definition`` and return its handle.

    Uses ``spark`` (a session or a context), else the context of this process, else makes one for ``master`` (default:
    local, as many slots as the parallelism) and stops it at the end. ``submission`` has settings and files for Spark.

    Raises:
        UsageError: the cluster has fewer slots than the parallelism, another driver runs this pipeline, there is no
            Java, or ``master`` is not where the context is.
        PipelineFailed: Spark could not start; it may, later.
    """
    config, submission = definition.config, submission or Submission()
    lock = lock_for(config)  # before a JVM is started
    parallelism = definition.plan.parallelism
    give_back: Callable[[], None] | None = None
    watcher = observer or SilentObserver()
    try:
        if has_finished(definition):
            discard_early()
            finished = Driver(definition, NullLauncher(), watcher, plan_fingerprint(definition), lock=lock, beats=True)
            finished.start()
            return SparkHandle(finished)
        with startup_errors():
            with CONTEXT_LOCK:
                context = find_context(spark, master)
                own: PipelineContext | None
                if context is not None:
                    discard_early()
                    own = PipelineContext.of(context)
                else:
                    context = make_context(config.name, parallelism, master, submission.conf)
                    own = PipelineContext(context)
                # under the lock: else the last user could stop it before this one counts
                give_back = None if own is None else own.use()
            _check_slots(context, parallelism)
            send_modules(context, submission)
            is_local = context.master.startswith("local")
            host = "127.0.0.1" if is_local else context.getConf().get("spark.driver.host")
        fingerprint = plan_fingerprint(definition)
        logs = log_directory(is_local=is_local)
        from pyspark import cloudpickle

        for module in modules_being_imported():
            cloudpickle.register_pickle_by_value(module)
        pickled(definition, cloudpickle.dumps)  # else a thread of its own would fail, and say less
        launcher = SparkLauncher(context, definition, fingerprint, is_local, logs)
        if logs is not None:
            watcher.on_note(LogPlace(str(logs / config.name)))
        driver = Driver(definition, launcher, watcher, fingerprint, host=host, lock=lock, beats=True)
    except BaseException:
        lock.release()
        if give_back is not None:
            give_back()
        raise
    # from here on the driver releases the lock, and the handle gives the context back
    driver.start()
    return SparkHandle(driver, give_back)


def find_context(spark: Any, master: str | None) -> Any:
    """Return the context that a pipeline will use and leave running; None if it has to make one.

    Args:
        spark: a session or a context; None: the context of this process, if it has one.
        master: what the pipeline was told to run on.

    Raises:
        UsageError: ``master`` is given, and the context is elsewhere.
    """
    from pyspark import SparkContext

    with CONTEXT_LOCK:  # none that another thread is about to stop
        forget_dead_jvm()
        context = SparkContext._active_spark_context if spark is None else getattr(spark, "sparkContext", spark)
    if context is not None and master is not None and not same_master(context.master, master):
        raise UsageError(
            f"master '{master}' is given, but the SparkSession that is there would be used, which is on "
            f"'{context.master}': leave the master out, or stop that session first"
        )
    return context


def make_context(name: str, parallelism: int, master: str | None, conf: Iterable[tuple[str, str]] = ()) -> Any:
    """Return a new SparkContext that logs little: the driver reports failures of workers, without JVM frames.

    ``conf``: settings of the user's, which count more than those that Headgate makes.

    Raises:
        UsageError: there is no such master, no Java, or no Spark.
        PipelineFailed: the master does not answer, or Spark's JVM ended.
    """
    url = master or os.environ.get("HEADGATE_MASTER")
    if url is None and SUBMITTED not in os.environ:  # spark-submit has been told its master
        url = f"local[{parallelism}]"
    options = session_options(name, url) | dict(conf)
    place = None if url is None else read_master(url)
    is_local = place is not None and place.is_local
    with startup_errors():
        if is_local:
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        if place is not None:
            check_prerequisites(place)
        ensure_jvm(jvm_settings(options))
        log_to(spark_log(name) if is_local else None)
        from pyspark import SparkConf, SparkContext

        context = SparkContext(conf=SparkConf().setAll(list(options.items())))
    ignore_sigterm_in_jvm(context)
    return context


def _stop(context: Any) -> None:
    """Stop a context; its JVM may have died before."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    with suppress(Py4JError, OSError):
        context.stop()


class WarmContext:
    """What a standby keeps ready: a local context that has run a job, so that its JVM and its Python workers are up.

    None on a cluster: an application that waits would hold slots that the running pipeline needs.
    """

    def __init__(self, name: str, parallelism: int, master: str | None, conf: Iterable[tuple[str, str]] = ()) -> None:
        self.spark: Any = None
        if _is_local(master):
            self.spark = make_context(name, parallelism, master, conf)
            warm_up(self.spark, parallelism)

    @property
    def is_alive(self) -> bool:
        """Whether its JVM runs."""
        return self.spark is None or self.spark._gateway.proc.poll() is None

    def close(self) -> None:
        """Stop the context, if there is one."""
        if self.spark is not None:
            _stop(self.spark)


def _is_local(master: str | None) -> bool:
    """Whether a context for ``master`` is in this machine alone."""
    return (master or os.environ.get("HEADGATE_MASTER") or "local").startswith("local")


def slots(context: Any) -> int:
    """Return how many tasks the context's cluster can run at the same time."""
    if context.master.startswith("local"):
        return int(context.defaultParallelism)
    scala = context._jsc.sc()
    profile = scala.resourceProfileManager().defaultResourceProfile()
    return int(scala.maxNumConcurrentTasks(profile))


def _check_slots(context: Any, parallelism: int) -> None:
    """Refuse what Spark would otherwise only retry for ten minutes."""
    deadline = time.monotonic() + SLOTS_WAIT_S
    while (free := slots(context)) < parallelism:
        if context.master.startswith("local") or time.monotonic() > deadline:  # on this machine it never gets more
            raise UsageError(
                f"parallelism {parallelism} needs as many slots, but {context.master} has {free}; "
                "lower the parallelism or give Spark more cores"
            )
        time.sleep(0.2)


def check_cluster(
    name: str, parallelism: int, spark: Any, master: str | None, conf: Iterable[tuple[str, str]] = ()
) -> None:
    """Check that a start would find Java, its master, and enough slots: for one that deletes something before.

    Nothing stays of it but the JVM, of which a process has one.

    Raises:
        UsageError, PipelineFailed: see ``start_pipeline``.
    """
    with startup_errors(), CONTEXT_LOCK:
        found = find_context(spark, master)
        context = make_context(name, parallelism, master, conf) if found is None else found
        try:
            _check_slots(context, parallelism)
        finally:
            if found is None:
                _stop(context)


def plan_fingerprint(definition: PipelineDefinition) -> str:
    """Return a text that differs when driver and workers do not run the same plan."""
    plan = definition.plan
    shape = repr((plan.edges, [(v.id, [n.name for n in v.nodes]) for v in plan.vertices], plan.parallelism))
    return hashlib.sha256((shape + repr(sorted(plan.state_texts().items()))).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Executor:
    """A slot of a cluster: its host, the versions of Python and Headgate there, and how far its clock is ahead."""

    host: str
    python: str
    headgate: str
    ahead_ms: int


def executors_of(master: str) -> list[Executor]:
    """Return what each slot of ``master`` says.

    Raises:
        UsageError: the master is malformed, or its executors cannot run Headgate.
        PipelineFailed: it does not answer, or Spark could not start.
    """
    read_master(master)
    context = make_context("doctor", 1, master)
    try:
        count = max(1, slots(context))
        rdd = context.parallelize(range(count), count)
        begun_ms = SYSTEM_CLOCK.wall_ms()
        found = rdd.mapPartitions(describe_executor).collect()
        return [Executor(host, python, release, _ahead_ms(at, begun_ms)) for host, python, release, at in found]
    except Exception as error:
        raise UsageError(job_error(str(error)) or str(error)) from None
    finally:
        context.stop()


def describe_executor(_: Iterator[Any]) -> Iterator[tuple[str, str, str, int]]:
    """Say where this process is, what it runs, and what time it is there."""
    yield platform.node(), platform.python_version(), __version__, SYSTEM_CLOCK.wall_ms()


def _ahead_ms(there_ms: int, begun_ms: int) -> int:
    """Return how far a clock is off: it was asked between the beginning and now."""
    if there_ms < begun_ms:
        return there_ms - begun_ms
    return max(0, there_ms - SYSTEM_CLOCK.wall_ms())
