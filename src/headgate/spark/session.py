"""Runs a pipeline on Spark: finds or makes the session, checks the cluster, starts the driver, hands out the handle.

Counterparts: ``api.pipeline`` above, ``runtime.driver.driver`` below. The only place that creates a SparkSession.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from headgate.errors import UsageError
from headgate.model.definition import PipelineDefinition
from headgate.model.progress import Observer, SilentObserver
from headgate.runtime.driver.driver import Driver, lock_for
from headgate.runtime.driver.handle import DriverHandle
from headgate.spark.launcher import SparkLauncher, warm_up
from headgate.spark.own_jvm import leave_sigterm_to_the_driver, options_of, temporary_directory
from headgate.spark.worker_logs import log_directory, spark_log

SLOTS_WAIT_S = 30.0
"""How long to wait for a cluster's executors to come up before the parallelism counts as too high."""

SLOTS_LOOK_S = 1
"""How often Spark looks whether a lost executor's replacement is there; its own 15 s would be recovery time."""

SLOTS_LOOKS_MAX = 600
"""As patient as Spark's own forty looks, for clusters that take minutes to find a machine."""

JVM_OPTIONS = "SPARK_SUBMIT_OPTS"

QUICK_COMPILER = "-XX:TieredStopAtLevel=1"
"""A pipeline's JVM computes nothing: optimizing code that runs once was a third of the processor time of a start."""


class SparkHandle(DriverHandle):
    """A pipeline that runs on Spark."""

    def __init__(self, driver: Driver, spark: Any, owns_session: bool) -> None:
        super().__init__(driver)
        self._spark = spark
        self._owns_session = owns_session

    def _release(self) -> None:
        from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]

        super()._release()
        if self._owns_session:
            self._owns_session = False
            with suppress(Py4JNetworkError, OSError):  # the JVM may have died before
                self._spark.stop()


def start_pipeline(
    definition: PipelineDefinition,
    *,
    spark: Any = None,
    master: str | None = None,
    observer: Observer | None = None,
) -> SparkHandle:
    """Start ``definition`` and return its handle.

    Uses ``spark``, else the active SparkSession, else makes one for ``master`` (default: local, as many slots as
    the parallelism) and stops it at the end.

    Raises:
        UsageError: the cluster has fewer slots than the parallelism, or another driver runs this pipeline.
    """
    from pyspark.sql import SparkSession

    config = definition.config
    lock = lock_for(config)  # before a JVM is started
    found = spark if spark is not None else SparkSession.getActiveSession()
    owns_session, session = found is None, found
    parallelism = definition.plan.parallelism
    try:
        if session is None:
            session = make_session(config.name, parallelism, master)
        _check_slots(session, parallelism)
        is_local = session.sparkContext.master.startswith("local")
        host = "127.0.0.1" if is_local else session.conf.get("spark.driver.host")
        fingerprint = plan_fingerprint(definition)
        logs = log_directory(is_local=is_local)
        launcher = SparkLauncher(session, definition, fingerprint, is_local, logs)
        watcher = observer or SilentObserver()
        if logs is not None:
            watcher.on_note(f"what workers write is in {logs / config.name}")
        driver = Driver(definition, launcher, watcher, fingerprint, host=host, lock=lock, beats=True)
    except BaseException:
        lock.release()
        if owns_session and session is not None:
            session.stop()
        raise
    driver.start()
    return SparkHandle(driver, session, owns_session)


def make_session(name: str, parallelism: int, master: str | None) -> Any:
    """Return a new SparkSession that keeps quiet: failures of workers are told by the driver, not by JVM frames."""
    from pyspark.sql import SparkSession

    master = master or os.environ.get("HEADGATE_MASTER") or f"local[{parallelism}]"
    if master.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark_warnings = spark_log(name) if master.startswith("local") else None
    quiet = os.path.join(os.path.dirname(__file__), f"log4j2-{'logged' if spark_warnings else 'quiet'}.properties")
    options = f"-Dlog4j2.configurationFile=file:{quiet} -Dlog4j.configurationFile=file:{quiet}"
    if spark_warnings is not None:
        options += f' "-Dheadgate.log={spark_warnings}"'
    builder = (
        SparkSession.builder.master(master)
        .appName(f"headgate-{name}")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
        .config("spark.scheduler.barrier.maxConcurrentTasksCheck.interval", f"{SLOTS_LOOK_S}s")
        .config("spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures", str(SLOTS_LOOKS_MAX))
        .config("spark.python.daemon.module", "headgate.spark.daemon")
    )
    given, java_options = options_of(temporary_directory() if master.startswith("local") else None)
    if "log4j" not in os.environ.get(JVM_OPTIONS, ""):
        java_options = f"{options} {java_options}"
    for key, value in {**given, "spark.driver.extraJavaOptions": java_options.strip()}.items():
        builder = builder.config(key, value) if value else builder
    if master.startswith("local"):
        builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    session = builder.getOrCreate()
    leave_sigterm_to_the_driver(session)
    return session


class WarmSession:
    """What a standby keeps ready: a local session that has run a job, so that its JVM and its Python workers are up.

    None on a cluster: an application that waits would hold slots that the running pipeline needs.
    """

    def __init__(self, name: str, parallelism: int, master: str | None) -> None:
        self.spark: Any = None
        if _stays_here(master):
            self.spark = make_session(name, parallelism, master)
            warm_up(self.spark, parallelism)

    @property
    def is_alive(self) -> bool:
        """Whether its JVM runs."""
        return self.spark is None or self.spark.sparkContext._gateway.proc.poll() is None

    def close(self) -> None:
        """Stop the session, if there is one."""
        from py4j.protocol import Py4JNetworkError

        if self.spark is not None:
            with suppress(Py4JNetworkError, OSError):  # the JVM may have died before
                self.spark.stop()


def _stays_here(master: str | None) -> bool:
    """Whether a session for ``master`` is in this machine alone."""
    return (master or os.environ.get("HEADGATE_MASTER") or "local").startswith("local")


@contextmanager
def quick_jvm() -> Iterator[None]:
    """A JVM that is started within this block starts quickly, and computes slowly.

    Only for processes that do nothing with Spark but run a pipeline: PySpark keeps one JVM for the whole life of a
    process. Options of the user's come later in its command, and win.
    """
    given = os.environ.get(JVM_OPTIONS)
    os.environ[JVM_OPTIONS] = QUICK_COMPILER if given is None else f"{QUICK_COMPILER} {given}"
    try:
        yield
    finally:
        if given is None:
            del os.environ[JVM_OPTIONS]
        else:
            os.environ[JVM_OPTIONS] = given


def slots(session: Any) -> int:
    """Return how many tasks the session's cluster can run at the same time."""
    context = session.sparkContext
    if context.master.startswith("local"):
        return int(context.defaultParallelism)
    scala = context._jsc.sc()
    profile = scala.resourceProfileManager().defaultResourceProfile()
    return int(scala.maxNumConcurrentTasks(profile))


def _check_slots(session: Any, parallelism: int) -> None:
    """Refuse what Spark would otherwise only retry for ten minutes."""
    deadline = time.monotonic() + SLOTS_WAIT_S
    while (free := slots(session)) < parallelism:
        if session.sparkContext.master.startswith("local") or time.monotonic() > deadline:
            raise UsageError(
                f"parallelism {parallelism} needs as many slots, but {session.sparkContext.master} has {free}; "
                "lower the parallelism or give Spark more cores"
            )
        time.sleep(0.2)


def check_cluster(name: str, parallelism: int, spark: Any, master: str | None) -> None:
    """Check that a start would find Java, its master, and enough slots: for one that deletes something before.

    Nothing stays of it but the JVM, of which a process has one.

    Raises:
        UsageError: the cluster has fewer slots than the parallelism.
        Exception: whatever Spark says when there is no Java or no such master.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    is_there = spark is not None or SparkContext._active_spark_context is not None
    session = spark or SparkSession.getActiveSession() or make_session(name, parallelism, master)
    try:
        _check_slots(session, parallelism)
    finally:
        if not is_there:
            session.stop()


def plan_fingerprint(definition: PipelineDefinition) -> str:
    """Return a text that differs when driver and workers do not run the same plan."""
    plan = definition.plan
    shape = repr((plan.edges, [(v.id, [n.name for n in v.nodes]) for v in plan.vertices], plan.parallelism))
    return hashlib.sha256((shape + repr(sorted(plan.state_texts().items()))).encode()).hexdigest()[:32]
