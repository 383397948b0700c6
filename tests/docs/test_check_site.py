"""``make docs`` refuses a site that loads something from outside or whose links lead nowhere."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs.documentation import ROOT

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
