"""Entry point of the command ``headgate``: start Spark's JVM early, then import and run the command line.

Spark's JVM and the imports of a command both take about a second, and neither needs the other. Which JVM a command
needs is guessed from its words: a JVM that does not fit is discarded, and another one is started.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from headgate.public_names import garbage_kept
from headgate.spark.jvm import adopt_environment, jvm_settings, launch_of, quick_options, session_options, start_early
from headgate.spark.prerequisites import JVM_OPTIONS, SUBMITTED, java_problem, read_master, spark_home_problem
from headgate.spark.py_files import program_place, with_directory

if TYPE_CHECKING:
    import typer

NO_JVM = frozenset({"--help", "--describe", "--supervised", "--standby"})
"""Options of commands that need no JVM, or not yet."""

CHANGES_JVM = frozenset({"--py-files", "--log-dir"})
"""Options that change what a JVM takes from this process: it is started when they are read."""

INTERRUPTED = 128 + signal.SIGINT
"""What a shell says of a command that Ctrl-C ended."""

SUPERVISED, PAGE, TOKEN = "HEADGATE_SUPERVISED", "--ui", "HEADGATE_UI_TOKEN"


def main() -> None:
    """Run the command. Ctrl-C while it starts ends it without a word, as it does later."""
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _run() -> None:
    with suppress(Exception):  # a JVM that cannot be started early is started later, with a proper error
        start_jvm(sys.argv[1:], os.environ)
    before = dict(os.environ)
    with garbage_kept():
        app = app_for(sys.argv[1:])
        from headgate.cli.command_line import call
    gc.freeze()  # modules stay: the collector need not look through them at all

    adopt_environment(before, os.environ)
    call(app)


def app_for(words: Sequence[str]) -> typer.Typer:
    """Return the command line for ``words``: with the command that they call, if there is such a one, else with all."""
    from headgate.cli.command_line import COMMANDS, command_line

    return command_line(words[:1] if words and words[0] in COMMANDS else COMMANDS)


def start_jvm(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Start the JVM of ``headgate run`` on this machine, if that is what ``words`` say and the JVM can be guessed.

    Raises:
        Exception: of any kind; no JVM was started.
    """
    if words[:1] != ["run"]:
        return
    options = words[1 : words.index("--")] if "--" in words else words[1:]
    given = {word.partition("=")[0] for word in options}
    program = program_of(words[1:])
    if given & (NO_JVM | CHANGES_JVM) or program is None or SUBMITTED in environ:
        return
    master = (values_of("--master", options) or [environ.get("HEADGATE_MASTER") or "local"])[-1]
    if (
        not read_master(master).is_local
        or java_problem(environ, shutil.which)
        or spark_home_problem(environ, shutil.which)
    ):
        return
    conf = dict(value.partition("=")[::2] for value in values_of("--conf", options))
    settings = jvm_settings(session_options("", master) | conf)
    start_early(launch_of(settings, environment_of(program, environ, has_page=PAGE in given)))


def program_of(words: Sequence[str]) -> str | None:
    """Return the program that a command names, as far as can be guessed; None if it makes Spark's session itself."""
    files = [word for word in words if word.endswith(".py")]
    if not files:
        return "."  # a module of the working directory, or an installed one
    with open(files[0], encoding="utf-8") as program:
        return None if "pyspark" in program.read() else files[0]


def values_of(option: str, words: Sequence[str]) -> list[str]:
    """Return what ``words`` give for ``option``, which may be repeated."""
    found = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, is_there, value = word.partition("=")
        if name == option:
            found.append(value if is_there else following)
    return found


def environment_of(program: str, environ: Mapping[str, str], *, has_page: bool) -> dict[str, str]:
    """Return the environment as it will be when the command needs a JVM."""
    taken_out = {SUPERVISED, TOKEN} if has_page else {SUPERVISED}
    environment = {name: value for name, value in environ.items() if name not in taken_out}
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment["PYTHONPATH"] = with_directory(program_place(program), environment.get("PYTHONPATH", ""))
    environment[JVM_OPTIONS] = quick_options(environment.get(JVM_OPTIONS))
    return environment


if __name__ == "__main__":
    main()
