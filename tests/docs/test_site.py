"""The site: every page can be reached, every link leads to a place, every command and name on a page exists."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
from tests.docs.command_line import page_of
from tests.docs.documentation import ROOT, anchored_links, anchors, fences, guide_pages, links, navigation, pages
from tests.docs.reference import page_with_table, pages_with_names

import headgate as hg
import headgate.testing
from headgate.cli.app import app
from headgate.connectors.files.line_source import LineOptions

MARKED = {'python title="Structured Streaming"', 'python title="Flink"', 'python title="Without Headgate"'}
"""Blocks of Python that are of other engines: they are compiled, not run."""
LANGUAGES = {"python", "text", "bash", "sql", "ini", "yaml", "toml", "dockerfile", *MARKED}
COMMAND_PAGES = ["README.md", "CONTRIBUTING.md", *guide_pages()]
REFERENCE = ROOT / "docs" / "reference"
COMMAND: Any = typer.main.get_command(app)


def test_every_page_is_in_the_navigation_once() -> None:
    named = navigation()
    assert sorted(named) == sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))


def test_every_link_to_a_place_leads_to_a_heading() -> None:
    wrong = [
        f"{page}: {target.name}#{place}"
        for page in pages()
        for target, place in anchored_links(page)
        if place not in anchors(target)
    ]
    assert wrong == []


def test_pages_of_the_site_link_only_to_the_site() -> None:
    """A link out of docs/ works in the repository and nowhere else."""
    docs = ROOT / "docs"
    outside = [
        f"{page}: {link}"
        for page in navigation()
        for link in links(docs / page)
        if not ((docs / page).parent / link).resolve().is_relative_to(docs)
    ]
    assert outside == []


@pytest.mark.parametrize("page", guide_pages())
def test_every_block_has_a_language_that_is_checked(page: str) -> None:
    for kind, code in fences(page):
        assert kind in LANGUAGES, f"{page}: a block of '{kind}' is checked by nobody"
        if kind in MARKED:
            ast.parse(code)


def commands_of(page: str) -> list[str]:
    """Return the command lines of ``headgate`` on a page: those in blocks of text, and those in the running text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    inline = [" ".join(found.split()) for found in re.findall(r"`(headgate [a-z][^`]*)`", text)]
    blocks = "\n".join(code for kind, code in fences(page) if kind in ("text", "bash", "ini"))
    lines = re.findall(r"^(?:\$ |ExecStart=\S*/|[A-Z_]+=\S+ )?(headgate [a-z].*)$", blocks, re.MULTILINE)
    return inline + [line.partition("  #")[0] for line in lines]


def problem_of(line: str) -> str | None:
    """Say what a command line names that does not exist, or None."""
    command: Any = COMMAND
    words = shlex.split(re.sub(r"[\[\]…|]", " ", line).replace("'", ""))[1:]
    while isinstance(command, click.Group) or hasattr(command, "commands"):
        if not words or words[0].startswith("-"):
            break
        word = words.pop(0)
        if word not in command.commands:
            return f"'{line}': there is no command '{word}'"
        command = command.commands[word]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    if "--" in words:
        words = words[: words.index("--")]
    unknown = [word for word in words if re.match(r"-{1,2}[a-z]", word) and word.partition("=")[0] not in known]
    return f"'{line}': there is no option {', '.join(unknown)}" if unknown else None


@pytest.mark.parametrize("page", COMMAND_PAGES)
def test_every_command_line_names_commands_and_options_that_exist(page: str) -> None:
    assert [problem for line in commands_of(page) if (problem := problem_of(line))] == []


def test_wrong_command_lines_are_found() -> None:
    assert problem_of("headgate run program.py --dir d --restore chk -- --anything") is None
    assert problem_of("headgate streams list") is None
    assert "no option --directory" in str(problem_of("headgate run program.py --directory d"))
    assert "no command 'crash'" in str(problem_of("headgate crash"))
    assert "no command 'burn'" in str(problem_of("headgate streams burn"))
    assert sum(len(commands_of(page)) for page in COMMAND_PAGES) > 60


def test_the_page_of_the_command_line_is_what_help_says() -> None:
    """``python -m tests.docs.command_line`` writes it anew."""
    assert (REFERENCE / "command-line.md").read_text(encoding="utf-8") == page_of(COMMAND)


@pytest.mark.parametrize("page", pages_with_names(), ids=lambda p: str(p.name))
def test_the_tables_of_the_reference_are_what_the_docstrings_say(page: Path) -> None:
    """``python -m tests.docs.reference`` writes them anew."""
    assert page.read_text(encoding="utf-8") == page_with_table(page)


def directives() -> list[str]:
    """Return the names whose docstrings the pages of the reference show."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md")))
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


def test_the_reference_has_every_public_name_once() -> None:
    public = [f"headgate.{name}" for name in hg.__all__ if name != "__version__"]
    public += [f"headgate.testing.{name}" for name in headgate.testing.__all__]
    shown = directives()
    assert len(shown) == len(set(shown))
    not_yet = {"headgate.Sliding"}
    assert sorted(set(public) - not_yet - set(shown)) == []
    for name in shown:
        module, _, attribute = name.rpartition(".")
        found = getattr(__import__(module, fromlist=[attribute]), attribute)
        found = getattr(found, "__origin__", found)  # of a generic class with its types
        assert found.__doc__, f"{name} has no docstring"


def test_names_of_the_package_that_pages_use_exist() -> None:
    wrong = []
    for page in guide_pages():
        for name in re.findall(r"\bhg\.([A-Za-z_]\w*)", (ROOT / page).read_text(encoding="utf-8")):
            if name not in hg.__all__:
                wrong.append(f"{page}: hg.{name}")
    assert wrong == []


def test_pages_that_messages_and_docstrings_name_exist() -> None:
    wrong = []
    for path in [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "examples").rglob("*.py"))]:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"\bdocs/[\w./-]+\.md\b", text):
            if not (ROOT / name).is_file():
                wrong.append(f"{path.name}: {name}")
        assert "user-guide" not in text, path
    assert wrong == []


CONNECTORS = [
    name.removeprefix("headgate.")
    for name in re.findall(
        r"^::: (headgate\.\w+)$", (REFERENCE / "connectors.md").read_text(encoding="utf-8"), re.MULTILINE
    )
]


@pytest.mark.parametrize("name", CONNECTORS)
def test_every_option_of_a_source_or_sink_is_in_its_docstring(name: str) -> None:
    """In its own; what sources of lines have in common, in ``LineOptions`` on the same page."""
    connector = getattr(hg, name)
    told = f"{connector.__doc__}\n{connector.__init__.__doc__}"
    options = [p.name for p in inspect.signature(connector).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if name in ("TextFiles", "JsonLines", "CsvFiles"):
        assert "``LineOptions``" in told
        told += str(LineOptions.__doc__)
        options += list(LineOptions.__annotations__)
    assert [option for option in options if not re.search(rf"\b{option}\b", told)] == []


PROBLEMS: Callable[[Path], list[str]] = runpy.run_path(str(ROOT / "scripts" / "check_site.py"))["problems"]
SOUND = """<link rel="canonical" href="https://example.org/"><link rel="stylesheet" href="a.css">
<h1 id="top">T</h1><a href="other/#here">x</a><a href="#top">y</a><a href="https://example.org">z</a>"""


def site_of(directory: Path, page: str, style: str = "p { color: red }") -> Path:
    """Return a site of two pages, one of which is given."""
    (directory / "other").mkdir()
    (directory / "index.html").write_text(page)
    (directory / "other" / "index.html").write_text('<h2 id="here">H</h2>')
    (directory / "a.css").write_text(style)
    return directory


def test_a_sound_site_has_no_problems(tmp_path: Path) -> None:
    assert PROBLEMS(site_of(tmp_path, SOUND)) == []


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ('<script src="https://cdn.example.org/x.js"></script>', "from outside"),
        ('<link rel="stylesheet" href="//fonts.example.org/css">', "from outside"),
        ('<img src="https://example.org/badge.svg">', "from outside"),
        ('<pre class="mermaid">graph</pre>', "'mermaid'"),
        ('<a href="missing/">x</a>', "no file"),
        ('<a href="other/#there">x</a>', "no place"),
        ('<a href="#nowhere">x</a>', "no place"),
    ],
)
def test_what_is_wrong_with_a_page_is_told(page: str, problem: str, tmp_path: Path) -> None:
    (found,) = PROBLEMS(site_of(tmp_path, page))
    assert problem in found


@pytest.mark.parametrize("style", ["@import 'https://x.org/a.css';", "p { background: url('//x.org/a.png') }"])
def test_a_style_that_loads_from_outside_is_told(style: str, tmp_path: Path) -> None:
    (found,) = PROBLEMS(site_of(tmp_path, SOUND, style))
    assert "a.css: loads" in found


def test_a_site_without_pages_is_a_problem(tmp_path: Path) -> None:
    assert PROBLEMS(tmp_path) == [f"there is no page in {tmp_path}"]
