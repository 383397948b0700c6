"""No text tells a user to install ``headgate`` from the package index: there it is another project."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.distribution import DISTRIBUTION, install_command

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "docs", "examples", "bench", "scripts")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = "|".join(PROJECT["optional-dependencies"])

WRONG = re.compile(
    rf"pip3? install(?:\s+-\S+)*[\s'\"`]+headgate(?![\w-]|\.[a-z])|(?<![\w./-])headgate\[(?:{EXTRAS})[\],]",
    re.MULTILINE,
)


def texts() -> Iterator[Path]:
    yield from (*ROOT.glob("*.md"), *ROOT.glob("*.txt"), ROOT / "pyproject.toml", ROOT / "Makefile")
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".md", ".sh", ".ipynb", ".html", ".js", ".toml", ".yml"}:
                yield path


def test_every_text_has_the_name_of_the_distribution() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    found = {
        f"{path.relative_to(ROOT)}: {match.group()}" for path in texts() for match in WRONG.finditer(path.read_text())
    }
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "pip install headgate",
        "pip install --upgrade headgate\n",
        "`pip install\n'headgate'`",
        "pip install 'headgate[ui]'",
        "| `headgate[rocksdb]` |",
        'pip install "headgate[s3,ui]"',
    ],
)
def test_the_other_name_is_noticed(text: str) -> None:
    assert WRONG.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install headgate-streams",
        "pip install 'headgate-streams[ui]'",
        "pip install ../headgate",
        install_command("s3"),
    ],
)
def test_the_right_name_is_not(text: str) -> None:
    assert not WRONG.search(text)
