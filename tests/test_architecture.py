"""What the layers may import, and that every rule of the specs has a line of code and a test."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headgate.model
import headgate.protocol

ROOT = Path(__file__).parent.parent
SPECS = [
    "alignment",
    "subtask",
    "coordinator",
    "recovery",
    "lives",
    "supervision",
    "two-phase-commit",
    "plan",
    "final-checkpoint",
    "restart",
    "state",
    "loops",
    "security",
]
_RULE = re.compile(r"^- \*\*([A-Z]+\d+)\*\* (.*)$", re.MULTILINE)
_TEST = re.compile(r"`(test_\w+)`")


def rules(spec: str) -> dict[str, str]:
    """Return ``number → text`` of the rules that ``spec`` states."""
    found = _RULE.findall((ROOT / "docs" / "spec" / f"{spec}.md").read_text())
    assert len(found) == len(dict(found)), f"{spec}.md states a number twice"
    return dict(found)


def text_of(folder: str) -> str:
    return "\n".join(p.read_text() for p in sorted((ROOT / folder).rglob("*.py")) if p != Path(__file__))


def modules_loaded_by(*names: str) -> set[str]:
    code = f"import sys\nfor name in {names!r}: __import__(name)\nprint(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_model_and_protocol_need_neither_arrow_nor_spark() -> None:
    names = [
        f"{package.__name__}.{module.name}"
        for package in (headgate.model, headgate.protocol)
        for module in pkgutil.iter_modules(package.__path__)
    ]
    loaded = modules_loaded_by("headgate.protocol", "headgate.model", *names)
    assert "headgate.protocol.coordinator" in loaded
    assert not loaded & {"pyarrow", "pyspark", "numpy", "polars", "msgspec", "sqlalchemy", "obstore", "asyncio"}


@pytest.mark.parametrize("spec", SPECS)
def test_every_rule_has_a_line_of_code_and_a_test(spec: str) -> None:
    source, tests = text_of("src"), text_of("tests")
    stated = rules(spec)
    assert stated
    for number, rule in stated.items():
        assert re.search(rf"\b{number}\b", source), f"no line of code names {number} of {spec}.md"
        assert re.search(rf"\b{number}\b", tests), f"no test names {number} of {spec}.md"
        named = _TEST.findall(rule)
        assert named, f"{number} of {spec}.md names no test"
        for test in named:
            assert f"def {test}(" in tests, f"{number} of {spec}.md names {test}, which does not exist"


def test_the_specs_that_are_listed_exist() -> None:
    listed = set(re.findall(r"\]\(([a-z-]+)\.md\)", (ROOT / "docs" / "spec" / "README.md").read_text()))
    assert set(SPECS) <= listed
