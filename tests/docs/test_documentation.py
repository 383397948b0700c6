"""The pages name only what there is: links lead somewhere, files exist, functions are defined."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.documentation import ROOT, SOURCE, code_names, definitions, file_of, links, pages

from headgate.codec import chunk, frames
from headgate.codec.handshake import HANDSHAKE_VERSION
from headgate.model import manifest as m
from headgate.model.manifest import SAVEPOINT_VERSION
from headgate.model.pipeline_identity import HEARTBEAT_VERSION, LIFE_VERSION, TARGETS_VERSION
from headgate.store.catalogue.tables import CATALOGUE_VERSION

NAMING = ["ARCHITECTURE.md", "CONTRIBUTING.md", *(f"docs/decisions/{p.name}" for p in ROOT.glob("docs/decisions/*.md"))]
EXAMPLE_FILES = {"quickstart.py", "limit_length.py", "test_limit_length.py"}
"""Files that a page asks its reader to write."""


def test_every_link_leads_to_a_file() -> None:
    assert [f"{page}: {link}" for page in pages() for link in links(page) if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", NAMING)
def test_every_file_and_function_that_is_named_exists(page: str) -> None:
    wrong = []
    for name in code_names(page):
        path, symbol = file_of(name), name.partition(":")[2]
        if Path(name).name in EXAMPLE_FILES:
            continue
        if path is None or (symbol and symbol not in definitions(path)):
            wrong.append(name)
    assert wrong == []


def test_the_walks_name_functions_in_many_files() -> None:
    walked = {name.split(":")[0] for name in code_names("ARCHITECTURE.md") if ":" in name}
    assert len(walked) >= 30
    assert {
        "runtime/worker/subtask_runner.py",
        "protocol/subtasks/alignment.py",
        "runtime/checkpoints/log.py",
    } <= walked


def test_every_package_is_on_the_map() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for package in sorted(p.parent.name for p in SOURCE.glob("*/__init__.py")):
        assert re.search(rf"^ {package}  |`{package}/`", text, re.MULTILINE), f"{package} is missing"


def test_the_table_of_formats_has_the_versions_of_the_code() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for told in (
        rf"`headgate-log` {m.LOG_VERSION} ",
        rf"`headgate-savepoint` {SAVEPOINT_VERSION} ",
        rf"`headgate-life` {LIFE_VERSION} ",
        rf"`headgate-targets` {TARGETS_VERSION}, `headgate-reset` {TARGETS_VERSION} ",
        rf"`headgate-heartbeat` {HEARTBEAT_VERSION} ",
        rf"`HGCHUNK` {chunk.VERSION} ",
        rf"`<store>/catalogue\.sqlite` \| {CATALOGUE_VERSION} ",
        rf"`{frames.MAGIC.decode()}` {frames.FRAME_VERSION} ",
        rf"`HGHS` {HANDSHAKE_VERSION} ",
    ):
        assert re.search(told, text), f"ARCHITECTURE.md says something else than {told}"


def test_every_kill_point_of_the_code_is_listed() -> None:
    reached = {
        point
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] != "sim"
        for point in re.findall(r"fault_points\.reach\(\"([a-z-]+)\"\)", path.read_text(encoding="utf-8"))
    }
    table = (ROOT / "docs/spec/faults.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| KP\d+ \| `([a-z-]+)` \|", table, re.MULTILINE))
    assert reached
    assert listed == reached


def test_every_decision_has_its_four_parts_and_is_in_the_index() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text(encoding="utf-8")
    records = sorted((ROOT / "docs/decisions").glob("0*.md"))
    assert [int(record.name[:4]) for record in records] == list(range(1, len(records) + 1))
    for record in records:
        text = record.read_text(encoding="utf-8")
        assert f"({record.name})" in index
        for part in ("Context", "Decision", "Evidence", "Consequences"):
            assert f"**{part}.**" in text, f"{record.name} has no {part}"


def test_every_specification_is_in_the_index() -> None:
    index = (ROOT / "docs/spec/README.md").read_text(encoding="utf-8")
    for spec in (ROOT / "docs/spec").glob("*.md"):
        assert spec.name == "README.md" or f"({spec.name})" in index, f"{spec.name} is not in the index"


def test_every_table_is_whole() -> None:
    """A row after an empty line begins another table, whose second line has to divide head and body."""
    broken = []
    for page in pages():
        lines, fenced = ["", *page.read_text(encoding="utf-8").splitlines(), ""], False
        for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
            fenced ^= line.lstrip().startswith("```")
            if not fenced and line.startswith("|") and not before.strip() and not re.fullmatch(r"[|:\- ]+", after):
                broken.append(f"{page}: {line[:60]}")
    assert broken == []
