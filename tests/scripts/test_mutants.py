"""``make mutants``: which changes are made, which are not, and how they get into a process."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> Any:
    """The two modules of the tool that need no command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts" / "mutants")
        import mutations
        import session

        yield mutations, session


def mutated(tool: Any, source: str) -> list[str]:
    """Return what each mutant of ``source`` makes of the line that it changes."""
    found = []
    for mutant in tool[0].mutants_of("m.py", source):
        ast.parse(mutant.applied(source))
        lines = zip(source.splitlines(), mutant.applied(source).splitlines(), strict=True)
        found.append(next(after.strip() for before, after in lines if before != after))
    return found


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = a is None", ["x = a is not None"]),
        ("x = (a) in (b)", ["x = (a) not in (b)"]),
        ("x = a and b", ["x = a or b"]),
        ("x = not a", ["x = (a)"]),
        ("x = -1", ["x = (1)"]),
        ("x = a + 1", ["x = a - 1", "x = a + (1 + 1)"]),
        ("x = (a + b) * c", ["x = (a - b) * c", "x = (a + b) + c"]),
        ("x += a", ["x -= a"]),
        ("x = True", ["x = False"]),
        ("x = 'key'", ["x = 'key_'"]),
        ("x.y = a", ["pass"]),
        ("call(a)", ["pass"]),
        ("del x[a]", ["pass"]),
        ("raise Wrong(1 + 1)", ["pass"]),
        ("return a", ["return None"]),
        ("x = a if b else c", ["x = a if not (b) else c"]),
        ("x = [a for a in b if c]", ["x = [a for a in b if not (c)]"]),
        ("while a: continue", ["while not (a): continue", "while a: break"]),
    ],
)
def test_each_change_is_made(tool: Any, body: str, wanted: list[str]) -> None:
    assert mutated(tool, f"def f(a, b, c):\n    {body}\n") == wanted


@pytest.mark.parametrize(
    "source",
    [
        '"""Docs."""',
        "LIMIT_MS = 5 * 1000",
        "PAUSES_S = (0.1, 0.3)",
        "def f(a, b):\n    x = zip(a, b, strict=True)",
        "__all__ = ['a']",
        "Number = NewType('Number', int)",
        "Event: TypeAlias = A | B",
        "if TYPE_CHECKING:\n    x = 1 + 1",
        "@dataclass(frozen=True)\nclass A:\n    n: Literal[1]",
        "def f(a: 'A' = None) -> 'A':\n    '''Docs.'''\n    assert a < 1, 'it is small'",
        "def f():\n    x = 'a text for people'",
        "def f():\n    _log.info('a', 1)",
        "def f(self):\n    self._check()",
        "class A:\n    def __repr__(self):\n        return 'a' + 'b'",
    ],
)
def test_what_no_test_should_look_at_is_left_out(tool: Any, source: str) -> None:
    assert mutated(tool, source) == []


def test_a_default_is_of_the_module_and_a_body_of_the_function(tool: Any) -> None:
    found = tool[0].mutants_of("m.py", "def f(a=1):\n    return a + 2\n")
    assert [(mutant.text, mutant.is_in_function) for mutant in found] == [
        ("(1 + 1)", False),
        ("None", True),
        (" - ", True),
        ("(2 + 1)", True),
    ]


def test_a_condition_that_a_comparison_negates_is_negated_once(tool: Any) -> None:
    assert mutated(tool, "def f(a):\n    if a == b:\n        pass\n") == ["if a != b:"]


def test_bytes_in_front_of_a_change_count(tool: Any) -> None:
    assert mutated(tool, "def f(a):\n    'é…'; g('é' < a)\n") == [
        "'é…'; pass",
        "'é…'; g('é_' < a)",
        "'é…'; g('é' <= a)",
    ]


def test_all_mutants_of_the_product_are_programs(tool: Any) -> None:
    count = 0
    for file in sorted((ROOT / "src" / "headgate" / "protocol").rglob("*.py")):
        source = file.read_text()
        for mutant in tool[0].mutants_of(str(file), source)[::10]:
            ast.parse(mutant.applied(source))
            count += 1
    assert count > 100


SOURCE = """
class A:
    @property
    def x(self):
        return 1

    @x.setter
    def x(self, value):
        self.y = value

def f(a):
    return a + 1
"""


def made(tmp_path: Path) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(SOURCE, str(tmp_path / "m.py"), "exec"), names)
    return names


def test_a_function_that_exists_gets_the_code_of_a_mutant(tool: Any, tmp_path: Path) -> None:
    names = made(tmp_path)
    f, an_a = names["f"], names["A"]()
    assert tool[1].exchange(str(tmp_path / "m.py"), SOURCE, SOURCE.replace("a + 1", "a - 1"))
    assert f(1) == 0
    assert tool[1].exchange(str(tmp_path / "m.py"), SOURCE, SOURCE.replace("self.y = value", "pass"))
    an_a.x = 3
    assert (an_a.x, hasattr(an_a, "y")) == (1, False)


def test_a_function_that_is_not_imported_gets_no_code(tool: Any, tmp_path: Path) -> None:
    assert not tool[1].exchange(str(tmp_path / "n.py"), SOURCE, SOURCE.replace("a + 1", "a - 1"))


def test_a_module_is_imported_from_the_text_of_a_mutant(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a_module_for_mutants.py"
    file.write_text("found = [1]")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [tool[1].Mutated(str(file), "found = [2]"), *sys.meta_path])
    assert importlib.import_module(file.stem).found == [2]


def test_a_child_sends_what_it_found_and_none_outlives_its_time(tool: Any) -> None:
    def hangs() -> dict[str, Any]:
        while True:
            pass

    def crashes() -> dict[str, Any]:
        os._exit(3)

    works = [(lambda: {"found": 1}, 60.0), (hangs, 0.1), (lambda: {"found": 1 // 0}, 60.0), (crashes, 60.0)]
    found = dict(tool[1].run_all(works, jobs=2))
    assert found[0] == {"found": 1}
    assert found[1] == {}
    assert "ZeroDivisionError" in found[2]["error"]
    assert found[3] == tool[1].DIED


@pytest.mark.run
def test_survivors_and_a_score_are_printed() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "mutants"), "errors.py", "--sample", "3"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True).stdout
    assert "errors.py: 3 of" in printed
    assert " of 3 killed (" in printed.splitlines()[-1]
