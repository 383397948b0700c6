"""Options and arguments that commands share, and the pipeline that an argument names.

A program is loaded, not run: what stands below ``if __name__ == "__main__"`` does not happen, and a bare ``p.run()``
ends the loading instead of running.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeAlias, cast

import typer

from headgate.api.config import CHECKPOINT_DIR_DEFAULT, ExponentialDelay, FailureRate, FixedDelay, NoRestart, Restart
from headgate.api.foreground import RunRequested, loading_only
from headgate.api.graph_builder import check_name
from headgate.api.pipeline import Pipeline
from headgate.cli.output import HOST, PageAddress
from headgate.dataclass import dataclass
from headgate.errors import HeadgateError, UsageError
from headgate.model.config import RestartStrategy, duration_ms
from headgate.operators.user_functions import user_traceback
from headgate.protocol.supervision.standby import BEAT_MS, Standby
from headgate.spark.py_files import Submission, program_place, read_py_files, read_settings, with_directory
from headgate.spark.worker_main import VARIABLE as LOG_DIRECTORY_VARIABLE


def check_pipeline_name(name: str | None) -> str | None:
    """Return the name of a pipeline, checked before anything is looked for.

    Raises:
        UsageError
    """
    return None if name is None else check_name(name, "a pipeline")


PipelineArgument: TypeAlias = Annotated[
    str, typer.Argument(help="Name of the pipeline.", callback=check_pipeline_name, show_default=False)
]
AnyPipelineArgument: TypeAlias = Annotated[
    str | None, typer.Argument(help="Name of a pipeline; without it, all are listed.", callback=check_pipeline_name)
]
DirOption: TypeAlias = Annotated[
    str,
    typer.Option("--dir", help="Directory or URL of the checkpoints.", show_default=CHECKPOINT_DIR_DEFAULT),
]
LocalDirOption: TypeAlias = Annotated[
    str,
    typer.Option("--dir", help="Directory or URL of the checkpoints.", show_default=CHECKPOINT_DIR_DEFAULT),
]
"""A pipeline of this machine is found by its lock: in its directory, or for a URL in one of the user's."""

JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def unwrap_paragraphs(text: str) -> str:
    """Return a docstring for the help: lines of a paragraph become one, because the terminal has a width of its own."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def unwrap_help(app: typer.Typer) -> None:
    """Have every command of ``app``, and of the groups in it, show its docstring in the width of the terminal."""
    for command in app.registered_commands:
        if command.help is None and command.callback is not None and command.callback.__doc__:
            command.help = unwrap_paragraphs(command.callback.__doc__)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            unwrap_help(group.typer_instance)


_KINDS: dict[str, type[Restart]] = {
    "none": NoRestart,
    "fixed-delay": FixedDelay,
    "failure-rate": FailureRate,
    "exponential-delay": ExponentialDelay,
}
_NUMBERS: dict[str, type[int] | type[float]] = {"attempts": int, "failures": int, "multiplier": float, "jitter": float}

RESTART_DEFAULT = "exponential-delay"


def restart_strategy(text: str) -> RestartStrategy:
    """Return the strategy of a text such as ``none`` or ``fixed-delay:attempts=3,delay=5s``.

    Raises:
        UsageError: there is no such strategy or value.
    """
    name, _, rest = text.partition(":")
    kind = _KINDS.get(name.strip().replace("_", "-"))
    if kind is None:
        raise UsageError(f"--restart must begin with one of {', '.join(_KINDS)}, not {name!r}")
    known = list(kind.__dataclass_fields__)
    values: dict[str, object] = {}
    for part in filter(None, rest.split(",")):
        key, is_given, value = (word.strip() for word in part.partition("="))
        key = key.replace("-", "_")
        if key not in known or not is_given:
            what = f"takes {', '.join(f'{field}=…' for field in known)}" if known else "takes no values"
            raise UsageError(f"--restart {name} {what}; {part.strip()!r} is none of them")
        values[key] = _value(key, value)
    return kind(**values).to_config()  # type: ignore[arg-type]


def _value(key: str, text: str) -> object:
    kind = _NUMBERS.get(key)
    if kind is None:
        return text  # a duration: the strategy checks it
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"--restart: {key} must be {what}, not {text!r}") from None


ProgramArgument: TypeAlias = Annotated[str, typer.Argument(help="A Python file, or a module, that makes a pipeline.")]
ProgramArguments: TypeAlias = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the program itself, after '--'.", show_default=False)
]
MasterOption: TypeAlias = Annotated[
    str | None, typer.Option(help="URL of the Spark master, such as local[4] or spark://host:7077.")
]
PyFilesOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="A .py, .zip or .egg for the workers; the program's own modules are sent without being named. May be "
        "repeated."
    ),
]
ConfOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="A setting of Spark, such as spark.executor.memory=2g. May be repeated.", metavar="NAME=VALUE"),
]
ParallelismOption: TypeAlias = Annotated[
    int | None, typer.Option("--parallelism", "-p", help="Subtasks of each operator.")
]
CheckpointDirOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--dir", help="Directory or URL of the checkpoints, instead of the program's."),
]
FromOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--restore",
        help="Begin at this savepoint, at DIR/NAME (the newest checkpoint of a pipeline), at DIR/NAME/chk-ID, or "
        "at the pipeline's own checkpoint ID. If the same command runs again, it continues from the newest checkpoint.",
    ),
]
GoBackOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="ID of the newest checkpoint: allows --restore to go back past it, so that its output is produced again."
    ),
]
UnclaimedOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="A removed operator whose state may be left behind. May be repeated."),
]
MovedOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--moved",
        metavar="OLD=NEW",
        help="What a source read or a sink wrote at OLD is at NEW now. May be repeated.",
    ),
]
FreshOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--fresh",
        help="Start over: delete the checkpoints and everything that the pipeline has written, without asking.",
    ),
]
LeaveOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="With --fresh: a sink whose target no longer exists and is not emptied. May be repeated."),
]
DescribeOption: TypeAlias = Annotated[bool, typer.Option("--describe", help="Print the plan and exit.")]
QuietOption: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
ProgressJsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Write progress as JSON lines.")]
SupervisedOption: TypeAlias = Annotated[
    bool, typer.Option("--supervised", help="Start the driver again if it dies, from a small supervising process.")
]
StandbyOption: TypeAlias = Annotated[
    bool,
    typer.Option("--standby", help="Wait while the pipeline runs elsewhere, and take over when its driver is gone."),
]
SilenceOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="How long a driver must be silent before --standby takes over, at least 5s.",
        show_default="5s",
    ),
]
MetricsPortOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Show the numbers of the run to Prometheus at this port, until it ends; 0: any port that is free."
    ),
]
MetricsHostOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="The address of --metrics-port, such as 0.0.0.0 for the whole network.", show_default="127.0.0.1"
    ),
]
MetricsPushOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Send the numbers of the run to an OpenTelemetry collector, such as http://localhost:4318."
    ),
]
RestartOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="When --supervised starts a driver again; the strategies are above.",
        show_default=RESTART_DEFAULT,
    ),
]
LogDirOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--log-dir",
        help="Directory of the workers' logs, by pipeline; on a cluster the same path on every machine. Default: "
        "$HEADGATE_LOG_DIR, else the user's state directory.",
    ),
]
UiOption: TypeAlias = Annotated[
    int | None, typer.Option("--ui", metavar="PORT", help="Show the pipeline on a web page at this port, live.")
]
UiHostOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Address of this machine that --ui listens on; others than loopback need HEADGATE_UI_TOKEN.",
        show_default=HOST,
    ),
]


def set_log_directory(directory: str | None) -> None:
    """Have this process, the drivers that it keeps and their workers write logs there; None: where they always do.

    Raises:
        UsageError: something else is there.
    """
    if directory is None:
        return
    place = Path(directory).expanduser().absolute()
    if not directory or (place.exists() and not place.is_dir()):
        raise UsageError(f"--log-dir must be a directory, but {directory or 'an empty name'} is none")
    os.environ[LOG_DIRECTORY_VARIABLE] = str(place)


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where a pipeline begins, as its user named it."""

    restore: str | None
    go_back_past: int | None
    allow_unclaimed_state: tuple[str, ...]
    moves: tuple[str, ...] = ()

    @property
    def moved(self) -> dict[str, str]:
        """What ``--moved`` says.

        Raises:
            UsageError: it says no two places.
        """
        found = [move.partition("=") for move in self.moves]
        for before, _, now in found:
            if not before or not now:
                raise UsageError("--moved names a former place and where it is now, such as --moved /old/in=/new/in")
        return {before: now for before, _, now in found}

    @property
    def restored(self) -> str | int | None:
        """What ``--restore`` names; a number is one of the pipeline's own checkpoints."""
        return int(self.restore) if self.restore is not None and self.restore.isdecimal() else self.restore


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of one ``headgate run``, as they were given."""

    master: str | None
    parallelism: int | None
    checkpoint_dir: str | None
    begins: StartPoint
    quiet: bool
    as_json: bool
    supervised: bool
    standby: bool
    restart: str | None
    fresh: bool = False
    leave: tuple[str, ...] = ()
    silence: str | None = None
    metrics_port: int | None = None
    metrics_host: str | None = None
    py_files: tuple[str, ...] = ()
    conf: tuple[str, ...] = ()
    page: PageAddress | None = None
    metrics_push: str | None = None

    def check(self) -> None:
        """Refuse options that do not go together.

        Raises:
            UsageError
        """
        if self.quiet and self.as_json:
            raise UsageError("give --quiet or --json, not both")
        if self.restart is not None and not self.supervised:
            raise UsageError(
                "--restart is about --supervised, which is not given; restarts of workers are in the program"
            )
        if self.fresh and self.begins.restore is not None:
            raise UsageError("give --fresh to begin at the beginning, or --restore to begin elsewhere, not both")
        if self.leave and not self.fresh:
            raise UsageError("--leave is about --fresh, which is not given")
        if self.fresh and self.standby:
            raise UsageError(
                "--standby goes on where another driver ended, and --fresh begins at the beginning: not both"
            )
        if self.silence is not None and not self.standby:
            raise UsageError("--silence is about --standby, which is not given")
        if self.metrics_host is not None and self.metrics_port is None:
            raise UsageError("--metrics-host is about --metrics-port, which is not given")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65_535:
            raise UsageError(f"--metrics-port is a number from 0 to 65535, not {self.metrics_port}")
        if self.page is not None:
            self.page.check()
        _ = self.strategy, self.silence_ms, self.submission, self.begins.moved  # checked without a supervisor, too

    @property
    def strategy(self) -> RestartStrategy:
        """What ``--restart`` says.

        Raises:
            UsageError: it is no strategy.
        """
        return restart_strategy(self.restart or RESTART_DEFAULT)

    @property
    def silence_ms(self) -> int:
        """What ``--silence`` says.

        Raises:
            UsageError: it is no duration, or shorter than a standby can tell.
        """
        least_ms = Standby.SILENCE_MS
        given_ms = least_ms if self.silence is None else duration_ms(self.silence, "--silence")
        if given_ms < least_ms:
            raise UsageError(
                f"--silence is {self.silence}, but must be {least_ms // 1_000}s at least: a driver gives a sign of "
                f"life every {BEAT_MS // 1_000}s"
            )
        return given_ms

    @property
    def submission(self) -> Submission:
        """What ``--py-files`` and ``--conf`` tell Spark.

        Raises:
            UsageError: a file or a setting is wrong.
        """
        return Submission(read_settings(self.conf), read_py_files(self.py_files))

    def of_a_driver(self) -> list[str]:
        """Return what a supervisor tells each of its drivers. What is restored is named every time: it goes back once
        (SV24). ``--fresh`` and ``--leave`` are not: it was done before."""
        values = {
            "--master": self.master,
            "--parallelism": self.parallelism,
            "--dir": self.checkpoint_dir,
            "--restore": self.begins.restore,
            "--go-back-past": self.begins.go_back_past,
            "--silence": self.silence,
            "--metrics-port": self.metrics_port,
            "--metrics-host": self.metrics_host,
            "--metrics-push": self.metrics_push,
            "--ui": None if self.page is None else self.page.port,
            "--ui-host": None if self.page is None else self.page.host,
        }
        flags = {"--quiet": self.quiet, "--json": self.as_json, "--standby": self.standby}
        given = [f"{name}={value}" for name, value in values.items() if value is not None]
        given += [name for name, is_on in flags.items() if is_on]
        given += [f"--py-files={file}" for file in self.py_files] + [f"--conf={setting}" for setting in self.conf]
        given += [f"--moved={move}" for move in self.begins.moves]
        return given + [f"--allow-unclaimed-state={name}" for name in self.begins.allow_unclaimed_state]


PROGRAM = "__headgate_program__"
"""Name of a file's module. It is not registered after loading, so that functions travel to workers by value."""

_NAMES = ("pipeline", "p")


def load_pipeline(target: str, arguments: Sequence[str] = ()) -> Pipeline:
    """Return the pipeline of a program.

    Args:
        target: path of a Python file, or name of a module.
        arguments: what the program finds in ``sys.argv[1:]``.

    Raises:
        UsageError: there is no such program, it fails, or it has no pipeline or several.
    """
    path = Path(target)
    is_file = target.endswith(".py") or path.is_file()
    if is_file and not path.is_file():
        raise UsageError(f"there is no file {target}")
    sys.argv = [target, *arguments]
    make_importable(program_place(target))
    try:
        with loading_only():
            names = _load_file(path) if is_file else vars(_load_module(target))
            return _pipeline_in(names, target)
    except RunRequested as requested:
        return cast(Pipeline, requested.pipeline)
    except (HeadgateError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise UsageError(f"{target} ended itself while it was loaded (exit code {error.code})") from error
    except Exception as error:
        raise UsageError(f"{target} cannot be loaded\n{user_traceback(error)}") from error


def _load_file(path: Path) -> dict[str, Any]:
    module = ModuleType(PROGRAM)
    module.__file__ = str(path)
    sys.modules[PROGRAM] = module  # dataclasses look their module up while they are defined
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))
        names = vars(module)
        made = names.get("pipeline")
        if callable(made) and not isinstance(made, Pipeline):
            names["pipeline"] = made()
        return names
    finally:
        sys.modules.pop(PROGRAM, None)


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"there is neither a file nor a module {name}") from error
        raise


def _pipeline_in(names: dict[str, Any], target: str) -> Pipeline:
    """Return what is called ``pipeline`` or ``p``, the result of ``pipeline()``, or the only pipeline there is."""
    for name in _NAMES:
        value = names.get(name)
        if isinstance(value, Pipeline):
            return value
        if name == "pipeline" and callable(value):
            made = value()
            if not isinstance(made, Pipeline):
                raise UsageError(f"{target}: pipeline() must return a headgate.Pipeline, not {made!r}")
            return made
    found = {id(value): value for value in names.values() if isinstance(value, Pipeline)}
    if len(found) == 1:
        return next(iter(found.values()))
    what = "several pipelines" if found else "no pipeline"
    raise UsageError(f"{target} has {what}; call the one to run 'pipeline', or return it from a function pipeline()")


def importable_from(file: str) -> str:
    """Return what has to be on the path to import from a ``.py``, ``.zip`` or ``.egg``."""
    return os.path.dirname(file) if file.endswith(".py") else file


def make_importable(directory: str) -> None:
    """Let the program, and the workers of local Spark, import what stands there (a directory, or an archive)."""
    if directory not in sys.path:
        sys.path.insert(0, directory)
    os.environ["PYTHONPATH"] = with_directory(directory, os.environ.get("PYTHONPATH", ""))
