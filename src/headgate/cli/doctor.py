"""``headgate doctor`` and ``headgate prepare``: check this machine, and make Spark start sooner on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from headgate import __version__
from headgate.api.config import CHECKPOINT_DIR_DEFAULT
from headgate.cli.output import Terminal, say
from headgate.dataclass import dataclass
from headgate.display.progress import counted, size_text
from headgate.distribution import DISTRIBUTION, install_command
from headgate.errors import HeadgateError
from headgate.spark.class_archive import archive_file, is_trusted, tried_mark
from headgate.spark.class_dump import make_archive
from headgate.spark.prerequisites import read_master, spark_home_problem
from headgate.spark.session import Executor
from headgate.storage.local_files import is_open_to_others, make_directories, user_state_directory
from headgate.storage.urls import absolute_location
from headgate.store.location import store_root
from headgate.store.store import Store

PYTHON_MIN = (3, 11)
JAVA_MIN = 17
DISK_FREE_MIN_BYTES = 1 << 30
MEMORY_FREE_MIN_BYTES = 2 << 30
JAVA_TIMEOUT_S = 20.0
CLOCK_OFF_MAX_MS = 1_000
"""Timers of processing time and dates of records differ by what clocks do; no decision of a checkpoint does."""

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*>=\s*([\d.]+)")
"""Requirements in the form of pyproject.toml; those of extras end in a marker and do not match."""

_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


class Verdict(Enum):
    """What a finding means."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"
    """Nothing runs without it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check: what was looked at, and one sentence."""

    subject: str
    verdict: Verdict
    sentence: str


def doctor(
    checkpoint_dir: str = typer.Option(CHECKPOINT_DIR_DEFAULT, "--dir", help="Where checkpoints will be written."),
    store: str | None = typer.Option(
        None, help="Where streams will be. Default: $HEADGATE_STORE, else .headgate/store."
    ),
    master: str | None = typer.Option(
        None, help="Look at the executors of this Spark master, too: their Python, their Headgate, their clocks."
    ),
) -> None:
    """Say what is missing on this machine; exit with 1 if something required is."""
    findings = examine(checkpoint_dir, store)
    if master is not None:
        findings.append(check_executors(master))
    table = Table(box=None, pad_edge=False)
    for title in ("verdict", "subject", "finding"):
        table.add_column(title)
    colours = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.MISSING: "red"}
    for finding in findings:
        colour = colours[finding.verdict]
        table.add_row(Text(finding.verdict.value, style=colour), finding.subject, finding.sentence)
    Terminal().print(table)
    if any(finding.verdict is Verdict.MISSING for finding in findings):
        raise typer.Exit(1)


def examine(checkpoint_dir: str, store: str | None) -> list[Finding]:
    """Return every finding, in the order in which they are worth mending."""
    checks: list[Callable[[], Finding]] = [
        check_python,
        check_java,
        check_spark_home,
        check_class_archive,
        check_packages,
        check_processors,
        check_memory,
        check_loopback,
        lambda: check_directory("checkpoint directory", checkpoint_dir),
        lambda: check_store(store),
    ]
    return [check() for check in checks]


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Check the version of this Python."""
    text = ".".join(map(str, version))
    if version[:2] < PYTHON_MIN:
        return Finding("Python", Verdict.MISSING, f"Python {text} is too old; install Python 3.11 or newer.")
    return Finding("Python", Verdict.OK, f"{text} at {sys.executable}")


def check_java() -> Finding:
    """Check that the Java that Spark would start is new enough."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    how = "install Java 17 or newer, for example with 'apt-get install openjdk-17-jre-headless'"
    if java is None:
        return Finding("Java", Verdict.MISSING, f"There is no java on the PATH: {how}.")
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=JAVA_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("Java", Verdict.MISSING, f"{java} cannot be run ({error}): correct JAVA_HOME, or {how}.")
    return judge_java(told.stderr + told.stdout, java, how)


def judge_java(told: str, java: str, how: str) -> Finding:
    """Judge what ``java -version`` printed."""
    match = _JAVA_VERSION.search(told)
    if match is None:
        return Finding("Java", Verdict.MISSING, f"{java} does not tell its version: {how}.")
    if int(match.group(1)) < JAVA_MIN:
        return Finding("Java", Verdict.MISSING, f"{java} is Java {match.group(1)}, which is too old: {how}.")
    return Finding("Java", Verdict.OK, f"{match.group(1)} at {java}")


def check_spark_home() -> Finding:
    """Check that a ``SPARK_HOME`` that is set has a Spark, and the one that PySpark is made for."""
    home = os.environ.get("SPARK_HOME")
    problem = spark_home_problem(os.environ, shutil.which)
    if problem is not None:
        return Finding("Spark", Verdict.MISSING, f"{problem}.")
    wanted = importlib.metadata.version("pyspark")
    if not home:
        return Finding("Spark", Verdict.OK, f"{wanted}, which came with PySpark")
    found = sorted(path.stem.rpartition("-")[2] for path in Path(home).glob("jars/spark-core_*.jar"))
    if found and wanted not in found:
        return Finding(
            "Spark",
            Verdict.WARNING,
            f"SPARK_HOME is {home} with Spark {found[0]}, but PySpark is {wanted}: unset it, or make them the same.",
        )
    return Finding("Spark", Verdict.OK, f"{wanted} at {home}")


def check_class_archive() -> Finding:
    """Check whether starts of Spark are prepared: nothing depends on it."""
    file = archive_file(os.environ)
    if file is None or not is_trusted(file):
        return Finding(
            "Spark's start",
            Verdict.OK,
            "not prepared; it takes less time after the first run on this machine, or 'headgate prepare'",
        )
    return Finding("Spark's start", Verdict.OK, f"prepared in {file}")


def check_executors(master: str) -> Finding:
    """Have the executors of a master tell what they are, and judge it."""
    from headgate.spark.session import executors_of

    try:
        return judge_executors(executors_of(master))
    except HeadgateError as error:
        sentence = str(error)
        return Finding("executors", Verdict.MISSING, f"{sentence[:1].upper()}{sentence[1:]}.")


def judge_executors(found: Sequence[Executor], python: str = platform.python_version()) -> Finding:
    """Judge what executors say: as the driver's are their Python, up to its last number, and their Headgate."""
    wrong = set()
    for one in found:
        if one.headgate != __version__:
            wrong.add(f"{one.host} has headgate {one.headgate}, and here is {__version__}")
        if one.python.split(".")[:2] != python.split(".")[:2]:
            wrong.add(f"{one.host} has Python {one.python}, and here is {python}")
    if wrong:
        told = "; ".join(sorted(wrong))
        return Finding("executors", Verdict.MISSING, f"{told}: install the same there, or set PYSPARK_PYTHON.")
    off = {one.host: one.ahead_ms for one in found if abs(one.ahead_ms) > CLOCK_OFF_MAX_MS}
    if off:
        told = ", ".join(f"{host} by {abs(ms) / 1000:.1f} s" for host, ms in sorted(off.items()))
        return Finding("executors", Verdict.WARNING, f"Clocks differ from this one ({told}): let NTP set them.")
    hosts = sorted({one.host for one in found})
    told = f"{counted(len(found), 'slot')} on {', '.join(hosts)}, with Python {found[0].python}"
    return Finding("executors", Verdict.OK, told)


def check_packages() -> Finding:
    """Check that everything Headgate requires is installed in a version that fits."""
    wrong = []
    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", Verdict.WARNING, f"not checked: {DISTRIBUTION} is not installed as a package")
    for text in required:
        match = _REQUIREMENT.fullmatch(text)
        if match is None:  # an optional one
            continue
        name, least = match.groups()
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is not installed")
            continue
        if _numbers(version) < _numbers(least):
            wrong.append(f"{name} is {version} but must be at least {least}")
    if wrong:
        return Finding("packages", Verdict.MISSING, f"{'; '.join(wrong)}: run '{install_command()}'.")
    return Finding("packages", Verdict.OK, f"PySpark {importlib.metadata.version('pyspark')} and all others")


def _numbers(version: str) -> tuple[int, ...]:
    """Return ``4.3.0rc1`` as ``(4, 3, 0)``."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("rc")[0])[:3])


def check_processors() -> Finding:
    """Check for two processors, the default parallelism."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count < 2:
        return Finding("processors", Verdict.WARNING, "There is only one: set parallelism=1, or expect slow pipelines.")
    return Finding("processors", Verdict.OK, f"{count}")


def check_memory() -> Finding:
    """Check that Spark's JVM and two workers fit into memory."""
    import psutil

    free = int(psutil.virtual_memory().available)
    text = f"{free / (1 << 30):.1f} GB free"
    if free < MEMORY_FREE_MIN_BYTES:
        return Finding("memory", Verdict.WARNING, f"{text}, but Spark and two workers need about 2 GB.")
    return Finding("memory", Verdict.OK, text)


def check_loopback() -> Finding:
    """Check that processes of this machine can reach each other."""
    try:
        with socket.socket() as listener, socket.socket() as client:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            client.settimeout(5)
            client.connect(listener.getsockname())
    except OSError as error:
        return Finding("ports", Verdict.MISSING, f"No connection over 127.0.0.1 ({error}): allow loopback connections.")
    return Finding("ports", Verdict.OK, "connections over 127.0.0.1 work")


def check_store(store: str | None) -> Finding:
    """Check the directory of the store, or whether the store on a server can be reached. A password is not shown."""
    try:
        root = store_root(store)
        if "://" not in root:
            return check_directory("store directory", root)
        if not Store.exists(root):
            return Finding("store", Verdict.WARNING, f"none at {root} yet; 'headgate streams create' makes it.")
    except HeadgateError as error:
        return Finding("store", Verdict.MISSING, f"{error}")
    return Finding("store", Verdict.OK, root)


def check_directory(subject: str, location: str) -> Finding:
    """Check that files can be made in ``location`` (or where it would be made) and that there is space."""
    absolute = absolute_location(location)
    if "://" in absolute:
        return Finding(subject, Verdict.OK, f"{absolute} (not on this machine; not tried)")
    existing = Path(absolute)
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding(subject, Verdict.MISSING, f"{absolute} cannot be written ({reason}): choose another one.")
    free = shutil.disk_usage(existing).free
    text = f"{absolute}, {free / (1 << 30):.1f} GB free"
    if free < DISK_FREE_MIN_BYTES:
        return Finding(subject, Verdict.WARNING, f"{text}: make at least 1 GB free.")
    if existing == Path(absolute) and is_open_to_others(existing):
        return Finding(
            subject, Verdict.WARNING, f"{text}: other users can read it; 'chmod -R go= {absolute}' keeps them out."
        )
    return Finding(subject, Verdict.OK, text)


def prepare() -> None:
    """Have Spark start sooner on this machine.

    Starts Spark once and keeps what it loads in one file, from which every pipeline of this user starts its JVM from
    then on. The first run on this machine, also after an update of Java or Spark, has the same done in the background
    at its end, unless HEADGATE_PREPARE is 'never' in the environment.

    The file is in headgate in $XDG_CACHE_HOME, or in ~/.cache. It may be deleted at any time.
    """
    say("Spark starts once, which takes about half a minute.", err=True)
    file = make_archive()
    say(f"{file} ({size_text(file.stat().st_size)}): pipelines start sooner from now on.")


PREPARE = (
    "note: pipelines will start sooner on this machine: a file of 150 MB is made in {}, once, in the background; "
    "HEADGATE_PREPARE=never prevents it"
)


def prepare_tip(master: str | None, environ: Mapping[str, str], *, is_terminal: bool) -> str | None:
    """Return what to say of the preparation in the background after a run on ``master``; None: nothing, or it was said.

    It is shown once for each user on a machine. Where that cannot be recorded, it is never shown.
    """
    url = master or environ.get("HEADGATE_MASTER") or "local"
    if not is_terminal or not read_master(url).is_local:
        return None
    file = archive_file(environ)
    if file is None or is_trusted(file) or not tried_mark(file).exists() or not _is_first("told-of-prepare"):
        return None
    return PREPARE.format(file.parent)


def _is_first(name: str) -> bool:
    with suppress(OSError, RuntimeError):
        directory = user_state_directory()
        make_directories(directory)
        os.close(os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        return True
    return False
