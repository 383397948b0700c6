"""What the pages of the documentation contain: links, examples, names of code."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "headgate"
PREAMBLE = "import polars as pl\nimport pyarrow as pa\n\nimport headgate as hg\n"

_FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ANY_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([a-z][\w/-]*(?:/[\w-]+)*\.(?:py|md|toml|txt)(?::[A-Za-z_][\w.]*)?)`")


def pages() -> list[Path]:
    """Return every page: those at the root and those below docs/ and bench/."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "bench").glob("*.md"))]


def navigation() -> list[str]:
    """Return the pages that the navigation of the site names, in its order, as paths below docs/."""
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    return list(_named(project["nav"]))


def _named(entry: object) -> Iterator[str]:
    """Yield the pages in a part of the navigation."""
    match entry:
        case str():
            yield entry
        case list() | dict():
            for inner in entry.values() if isinstance(entry, dict) else entry:
                yield from _named(inner)


def guide_pages() -> list[str]:
    """Return the pages of the site that are for users of Headgate: what it does, and how it is used."""
    return [f"docs/{page}" for page in navigation() if not page.startswith(("spec/", "decisions/", "benchmarks"))]


def fences(page: str) -> list[tuple[str, str]]:
    """Return what stands behind the opening fence of each block of code, and the code."""
    return [(kind.strip(), code) for _, kind, code in _ANY_FENCE.findall((ROOT / page).read_text(encoding="utf-8"))]


def example_with(text: str) -> str:
    """Return the one Python block of the guide in which ``text`` stands."""
    (code,) = (code for page in guide_pages() for code in examples(page) if text in code)
    return code


def anchors(page: Path) -> set[str]:
    """Return what a link to a place on a page may name, as the site makes it of the headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", _FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading)
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())
        number, name = 1, slug
        while name in found:
            name, number = f"{slug}_{number}", number + 1
        found.add(name)
    return found


def anchored_links(page: Path) -> list[tuple[Path, str]]:
    """Return the links to places on pages: the page, and the place."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    split = [link.partition("#") for link in _LINK.findall(text) if "#" in link and "://" not in link]
    return [((page.parent / path).resolve() if path else page, place) for path, _, place in split]


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
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return frozenset(found)
