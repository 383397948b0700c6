"""Writes the page of the command line from what ``--help`` says: ``python -m tests.docs.command_line``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.docs.documentation import ROOT

PAGE = ROOT / "docs" / "reference" / "command-line.md"
BEGINNING = """# Command line

Made from `headgate --help` and the help of each command. `headgate --version` prints the release.

`headgate run` loads the program and runs what it calls `pipeline` or `p`, or what its function `pipeline()` returns.
What stands below `if __name__ == "__main__"` is not run. On local Spark the JVM is started while the program is loaded.
If the program changes the environment, the working directory or limits of the process meanwhile, another JVM is
started instead. It is told to start quickly rather than to optimize (`-XX:TieredStopAtLevel=1`); `SPARK_SUBMIT_OPTS`
overrides that.

## Exit codes

| Code | Meaning |
|---|---|
| 0 | finished, or stopped after a last checkpoint |
| 1 | failed, and starting again may help |
| 2 | wrong use |
| 3 | failed for good: a function or a record, output that a target denies, or state that does not fit must be mended |
| 4 | another process is running the pipeline |
"""


def page_of(command: Any) -> str:
    """Return the page as text."""
    return BEGINNING + "".join(_sections(command, "headgate"))


def _sections(command: Any, name: str) -> Iterator[str]:
    """Yield a section for each command that does something."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield _section(command, name)
        return
    for word in sorted(inner):
        yield from _sections(inner[word], f"{name} {word}")


def _section(command: Any, name: str) -> str:
    """Return the section of one command: its usage, what it does, and tables of what it takes."""
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option"]
    usage = " ".join([name, *(_usage(p) for p in arguments), *(["[OPTIONS]"] if options else [])])
    rows = [f"| `{_usage(p)}` | {_text(p)} |" for p in arguments]
    rows += [f"| `{', '.join([*p.opts, *p.secondary_opts])}` | {_text(p)} |" for p in options]
    table = "\n".join(["| | |", "|---|---|", *rows]) + "\n" if rows else ""
    return f"\n## {name}\n\n```text\n{usage}\n```\n\n{_help(command)}\n\n{table}".rstrip("\n") + "\n"


def _usage(argument: Any) -> str:
    """Return an argument as it stands in a usage line."""
    word = (argument.metavar or argument.name).upper().strip("[]").rstrip(".").replace("-", "_")
    word += "…" if argument.nargs == -1 else ""
    return word if argument.required else f"[{word}]"


def _help(command: Any) -> str:
    """Return what a command does, paragraph by paragraph."""
    paragraphs = re.split(r"\n\s*\n", (command.help or "").replace("\b", "").strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _text(parameter: Any) -> str:
    """Return what a parameter means, and its default where the help shows one."""
    told = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    shown = getattr(parameter, "show_default", None)
    default = shown if isinstance(shown, str) else None
    if default is None and shown and parameter.default not in (None, False, ()) and not callable(parameter.default):
        default = str(parameter.default)
    return f"{told} Default: `{default}`." if default else told


if __name__ == "__main__":
    import typer.main

    from headgate.cli.app import app

    PAGE.write_text(page_of(typer.main.get_command(app)), encoding="utf-8")
