"""What the pages of the documentation contain: links, examples, names of code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.syntax import parsed

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "headgate"
PREAMBLE = "import polars as pl\nimport pyarrow as pa\n\nimport headgate as hg\n"

_FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([a-z][\w/-]*(?:/[\w-]+)*\.(?:py|md|toml|txt)(?::[A-Za-z_][\w.]*)?)`")


def pages() -> list[Path]:
    """Return every page: those at the root and those below docs/ and bench/."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "bench").glob("*.md"))]


def examples(page: str) -> list[str]:
    """Return the Python blocks of a page that stand at the beginning of a line."""
    return _FENCE.findall((ROOT / page).read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Return the targets of the links to files, without fragments."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    return [link.split("#")[0] for link in _LINK.findall(text) if "://" not in link and not link.startswith("#")]


def code_names(page: str) -> list[str]:
    """Return what a page names as a file, or as a file and something that it defines (``a/b.py:C.d``)."""
    return _CODE.findall(_FENCED.sub("", (ROOT / page).read_text(encoding="utf-8")))


def file_of(name: str) -> Path | None:
    """Return the file that a name without its ``:symbol`` stands for, in the package or in the project."""
    path = name.split(":")[0]
    return next((base / path for base in (SOURCE, ROOT) if (base / path).is_file()), None)


@cache
def definitions(path: Path) -> frozenset[str]:
    """Return the names that a module defines: ``function``, ``Class``, ``Class.method``."""
    found: set[str] = set()
    for node in parsed(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return frozenset(found)
