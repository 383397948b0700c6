"""Writes the tables of names into the pages of the reference: ``python -m tests.docs.reference``.

The site shows the docstrings in full where a page has ``:::``. The tables are for those who read the pages in a clone.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.docs.documentation import ROOT, SOURCE

REFERENCE = ROOT / "docs" / "reference"
BEGINNING = """<!-- made by python -m tests.docs.reference -->

## Overview

The files are below `src/headgate`. Each docstring says more: it follows here on the site, and `help()` prints it, as in
`help(headgate.{example})`.

| Name | | File |
|---|---|---|
"""
END = "\n<!-- end -->\n\n"

CALLED_BY_RUNTIME = "connectors.md"
"""Programs construct what is on this page; its methods are for the runtime."""

_MADE = re.compile(rf"{re.escape(BEGINNING.splitlines()[0])}.*?{END}", re.DOTALL)
_DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)


def pages_with_names() -> list[Path]:
    """Return the pages of the reference that show docstrings."""
    return [page for page in sorted(REFERENCE.glob("*.md")) if _DIRECTIVE.search(page.read_text(encoding="utf-8"))]


def page_with_table(page: Path) -> str:
    """Return the text of a page with the table of its names, which stands before the first docstring."""
    text = _MADE.sub("", page.read_text(encoding="utf-8"))
    names = _DIRECTIVE.findall(text)
    table = BEGINNING.format(example=names[0].removeprefix("headgate."))
    table += "".join(f"{row}\n" for name in names for row in _rows(name, has_methods=page.name != CALLED_BY_RUNTIME))
    at = text.index("::: ")
    return text[:at] + table + END + text[at:]


def _rows(path: str, *, has_methods: bool) -> Iterator[str]:
    """Yield the row of one name, and those of its methods."""
    module, _, name = path.rpartition(".")
    found = getattr(__import__(module, fromlist=[name]), name)
    found = getattr(found, "__origin__", found)  # of a generic class with its types
    shown = path.removeprefix("headgate.")
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        file, told = _constants()[name]
        yield _row(shown, told, file)
        return
    file = Path(str(sys.modules[found.__module__].__file__)).relative_to(SOURCE).as_posix()
    yield _row(shown + _parameters(found), found.__doc__, file)
    for method, value in _members(found).items() if inspect.isclass(found) and has_methods else ():
        if _docstring(value) and not method.startswith("_"):
            yield _row(f"{name}.{method}{_parameters(value)}", _docstring(value), "")


def _members(found: type) -> dict[str, Any]:
    """Return what a class defines, and what it has from bases that have no place of their own in the reference."""
    bases = [base for base in found.__mro__[1:] if base.__module__.startswith("headgate.")]
    inherited = [vars(base) for base in bases if base.__name__ not in _documented()]
    return {**{name: value for each in reversed(inherited) for name, value in each.items()}, **vars(found)}


@cache
def _documented() -> frozenset[str]:
    """Return the names of the reference, without their modules."""
    names = [name for page in pages_with_names() for name in _DIRECTIVE.findall(page.read_text(encoding="utf-8"))]
    return frozenset(name.rpartition(".")[2] for name in names)


def _row(name: str, docstring: str | None, file: str) -> str:
    """Return a row: a name, the first line of its docstring, and its file."""
    told = (docstring or "").strip().partition("\n")[0].replace("|", "\\|")
    return f"| `{name}` | {told} | {file and f'`{file}`'} |"


def _parameters(found: Any) -> str:
    """Return the names of what a function, a method or the constructor of a class takes; "" if it is not called."""
    if inspect.isclass(found) and (getattr(found, "_is_protocol", False) or "__init__" not in _members(found)):
        return ""
    found = getattr(found, "__func__", found)
    if not (inspect.isfunction(found) or inspect.isclass(found)):
        return ""
    shown: list[str] = []
    for each in inspect.signature(found).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not any(name.startswith("*") for name in shown):
            shown.append("*")
        stars = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
        shown += [stars + each.name] if each.name not in ("self", "cls") and not each.name.startswith("_") else []
    return f"({', '.join(shown)})"


def _docstring(value: Any) -> str | None:
    """Return the docstring of a method or a property, None for anything else."""
    value = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
    return value.__doc__ if inspect.isfunction(value) else None


@cache
def _constants() -> dict[str, tuple[str, str]]:
    """Return the file of each constant that has a docstring, and this."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for statement, after in itertools.pairwise(body):
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                for target in targets:
                    if isinstance(target, ast.Name) and not target.id.startswith("_"):
                        found[target.id] = (path.relative_to(SOURCE).as_posix(), str(after.value.value))
    return found


if __name__ == "__main__":
    for page in pages_with_names():
        page.write_text(page_with_table(page), encoding="utf-8")
