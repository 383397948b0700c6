"""What the layers may import, and that every rule of the specs is stated once and has a test."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import headgate
import headgate.model
import headgate.protocol
from headgate.cli.command_line import COMMANDS
from headgate.protocol.machine import Machine

pytestmark = pytest.mark.xdist_group("architecture")
"""One process reads all files once for all of these tests."""

ROOT = Path(__file__).parent.parent
_TEST = re.compile(r"`(test_\w+)`")


@cache
def text_of(folder: str) -> str:
    return "\n".join(p.read_text() for p in sorted((ROOT / folder).rglob("*.py")) if p != Path(__file__))


@cache
def defined_tests() -> frozenset[str]:
    return frozenset(re.findall(r"\bdef (test_\w+)\(", text_of("tests") + Path(__file__).read_text()))


@cache
def trees_of(folder: str) -> dict[Path, ast.Module]:
    """Return the syntax trees of a folder, but for this file's."""
    paths = [path for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]
    return {path: ast.parse(path.read_text()) for path in paths}


@cache
def nodes_of(folder: str) -> dict[Path, tuple[ast.AST, ...]]:
    """Return every node of the syntax trees of a folder."""
    return {path: tuple(ast.walk(tree)) for path, tree in trees_of(folder).items()}


def modules_loaded_by(*names: str) -> set[str]:
    code = f"import sys\nfor name in {names!r}: __import__(name)\nprint(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_model_and_protocol_need_neither_arrow_nor_spark() -> None:
    names = [
        module.name
        for package in (headgate.model, headgate.protocol)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    loaded = modules_loaded_by("headgate.protocol", "headgate.model", *names)
    assert "headgate.protocol.checkpoints.coordinator" in loaded
    assert not loaded & {"pyarrow", "pyspark", "numpy", "polars", "msgspec", "sqlalchemy", "obstore", "asyncio"}


def imports_between_modules() -> dict[str, set[str]]:
    """Return what each module of headgate imports of it, at its top, for type checkers only, or in a function.

    The package itself is left out: it names what is public, and imports it when it is asked.
    """
    source = ROOT / "src"
    paths = {".".join(path.relative_to(source).with_suffix("").parts): path for path in source.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items() if name != "headgate.__init__"}
    found: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        for node in nodes_of("src")[path]:
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} imports by a relative name"
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= inner & set(paths) or {str(node.module)}
    return {name: (imported & set(paths)) - {name} for name, imported in found.items()}


def in_a_circle(imports: dict[str, set[str]]) -> set[str]:
    """Return what remains when modules that import nothing, and those that nobody imports, are taken away."""
    left = dict(imports)
    while True:
        imported = set().union(*left.values()) if left else set()
        on = {name: found & set(left) for name, found in left.items() if name in imported and found & set(left)}
        if on == left:
            return set(left)
        left = on


def test_no_modules_import_each_other_in_a_circle() -> None:
    imports = imports_between_modules()
    assert len(imports) > 200
    assert "headgate.model.ids" in imports["headgate.protocol.checkpoints.coordinator"]
    assert in_a_circle(imports) == set()


FOR_TESTS = {"forget_memory_storage"}
"""What only tests use: a way to begin with an empty storage."""


def names_of_a_module(tree: ast.Module) -> set[str]:
    """Return the functions, classes and constants of a module, but for what a decorator hands to somebody."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            is_handed_over = isinstance(node, ast.FunctionDef) and node.decorator_list
            found |= set() if is_handed_over else {node.name}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if not name.startswith("__")}


def names_used(nodes: Sequence[ast.AST]) -> set[str]:
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    imported = {a.name for node in nodes if isinstance(node, ast.ImportFrom) for a in node.names}
    return loaded | attributes | imported


def test_nothing_in_a_module_is_left_unused() -> None:
    trees = trees_of("src")
    used = set().union(*map(names_used, nodes_of("src").values())) | FOR_TESTS
    public = set(headgate.__all__) | {name for _, name in COMMANDS.values()}
    unused = {path.name: sorted(names_of_a_module(tree) - used - public) for path, tree in trees.items()}
    assert {name: left for name, left in unused.items() if left} == {}


def test_circles_are_found() -> None:
    line = {"a": {"b"}, "b": {"c"}, "c": set[str]()}
    assert in_a_circle(line) == set()
    assert in_a_circle({**line, "c": {"b"}, "d": {"c"}}) == {"b", "c"}


# -- over all pages of docs/spec ---------------------------------------------------------------------------------------

PAGES = {p.stem: p.read_text() for p in sorted((ROOT / "docs" / "spec").glob("*.md")) if p.stem != "README"}
_NUMBERS = re.compile(r"[A-Z]+\d+")
_STATED = re.compile(r"^- \*\*([A-Z]+\d+(?:, [A-Z]+\d+)*)[^*]*\*\*(.*?)(?=^- \*\*|^#|^$|\Z)", re.MULTILINE | re.DOTALL)
"""A rule as an item of a list: its number, or numbers, and its text."""

_IN_A_TABLE = re.compile(r"^\| ([A-Z]+\d+) \|(.*)$", re.MULTILINE)

NO_RULES = {"S3"}
"""What looks like the number of a rule: a storage of Amazon's."""

NAMED_BY_TESTS = {"F", "I", "KP"}
"""Faults, invariants and kill points: they say what whole modules of tests are about."""

CITING = ["src", "tests", "docs", "bench", "examples", "scripts", "ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"]


def test_every_test_that_a_page_names_exists() -> None:
    modules = {path.stem for path in (ROOT / "tests").rglob("*.py")}
    for page, text in PAGES.items():
        for test in _TEST.findall(text):
            assert test in modules | defined_tests(), f"{page}.md names {test}, which does not exist"


def stated_on(page: str) -> list[str]:
    """Return the numbers of the rules that ``page`` states, each as often as it does."""
    items = [number for numbers, _ in _STATED.findall(PAGES[page]) for number in _NUMBERS.findall(numbers)]
    return items + [number for number, _ in _IN_A_TABLE.findall(PAGES[page])]


def citing() -> dict[str, str]:
    """Return the text of every file that may cite rules, without what tells linters to be silent."""
    paths = [path for name in CITING for path in sorted([ROOT / name, *(ROOT / name).rglob("*")])]
    paths = [path for path in paths if path.suffix in {".py", ".md"} and path != Path(__file__)]
    return {str(path.relative_to(ROOT)): re.sub(r"# noqa.*", "", path.read_text()) for path in paths}


def test_every_number_is_stated_once_and_on_one_page() -> None:
    pages: dict[str, list[str]] = {}
    for page in PAGES:
        for number in stated_on(page):
            pages.setdefault(number, []).append(page)
    assert len(pages) > 250
    assert {number: found for number, found in pages.items() if len(found) > 1} == {}


def test_every_number_that_is_cited_is_stated() -> None:
    stated = {number for page in PAGES for number in stated_on(page)}
    letters = sorted({number.rstrip("0123456789") for number in stated})
    number = re.compile(rf"\b(?:{'|'.join(letters)})\d+\b")
    cited = {name: set(number.findall(text)) for name, text in citing().items()}
    assert len(set().union(*cited.values())) > 250
    unknown = {name: sorted(found - stated - NO_RULES) for name, found in cited.items() if found - stated - NO_RULES}
    assert unknown == {}, "no page of docs/spec says what they mean"


def test_the_list_of_specs_names_the_letters_of_every_page() -> None:
    readme = (ROOT / "docs" / "spec" / "README.md").read_text()
    rows = dict(re.findall(r"^\| \[[^]]*\]\(([a-z-]+)\.md\) \| ([^|]*) \|", readme, re.MULTILINE))
    assert {page: set(re.findall(r"[A-Z]+", rows[page])) for page in PAGES} == {
        page: {number.rstrip("0123456789") for number in stated_on(page)} for page in PAGES
    }


def test_every_rule_has_a_test() -> None:
    """A test names the rules that it proves in a comment, in its docstring, or in its module's: ``# SV20``."""
    named = set(re.findall(r"\b[A-Z]+\d+\b", text_of("tests") + Path(__file__).read_text()))
    rules = {n for page in PAGES for n in stated_on(page) if n.rstrip("0123456789") not in NAMED_BY_TESTS}
    assert len(rules) > 250
    assert sorted(rules - named) == [], "no test says that it proves them: write their numbers beside one that does"


# -- no verdict of a test depends on how fast the machine is ----------------------------------------------------------

PATIENCE_S_MIN = 20
"""A wait for something that must come is at least this long: a busy machine may take seconds for anything."""

NO_WAIT = "not a wait for anything"
"""What the comment beside a sleep says that stands for slow work, or for the time of a fault."""


def impatient(lines: list[str], nodes: Sequence[ast.AST]) -> list[int]:
    """Return the lines that wait for a time instead of a condition, or too short a time for something to come.

    A sleep between two looks at a condition is inside a ``while``; a timeout of 0 is a look.
    """
    polls = {id(call) for loop in nodes if isinstance(loop, ast.While) for call in ast.walk(loop)}
    found = []
    for call in nodes:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute | ast.Name):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
        value = call.func.value if isinstance(call.func, ast.Attribute) else None
        is_pause = name == "sleep" or (name == "wait" and isinstance(value, ast.Call) and call.args)
        limits = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
        limits += call.args[-1:] if name in ("wait", "join", "result", "wait_for") else []
        numbers = [limit.value for limit in limits if isinstance(limit, ast.Constant)]
        is_short = any(type(n) in (int, float) and 0 < n < PATIENCE_S_MIN for n in numbers)
        is_excused = NO_WAIT in lines[call.lineno - 1] or (is_pause and id(call) in polls)
        if (is_pause or is_short) and not is_excused:
            found.append(call.lineno)
    return found


def test_tests_wait_for_conditions_and_patiently() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, nodes in nodes_of("tests").items()
        for line in impatient(path.read_text().splitlines(), nodes)
    ]
    assert found == [], f"wait for a condition, at least {PATIENCE_S_MIN} s; or say in a comment: {NO_WAIT}"


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("time.sleep(0.5)", True),
        ("sleep(0.5)", True),
        ("threading.Event().wait(0.5)", True),
        ("inbox.get(timeout=0.3)", True),
        ("thread.join(5)", True),
        ("process.wait(20)", False),
        ("while not ready():\n    time.sleep(0.5)", False),
        ("time.sleep(0.5)  # slow work: not a wait for anything", False),
        ("barrier.wait()", False),
        ("future.result(0)", False),
        ("counts.get(key, 1)", False),
    ],
)
def test_impatience_is_found(text: str, is_refused: bool) -> None:
    assert bool(impatient(text.splitlines(), list(ast.walk(ast.parse(text))))) is is_refused


def test_hypothesis_has_one_profile_that_judges_no_machine() -> None:
    assert settings.default is settings.get_profile("headgate")
    assert settings.default.deadline is None
    assert {HealthCheck.too_slow, HealthCheck.filter_too_much} <= set(settings.default.suppress_health_check)
    assert settings.default.print_blob
    for path, nodes in nodes_of("tests").items():
        name = str(path.relative_to(ROOT))
        keywords = {k.arg for call in nodes if isinstance(call, ast.Call) for k in call.keywords}
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        is_profile = name == "tests/conftest.py"
        assert is_profile or not {"deadline", "print_blob", "derandomize"} & keywords, f"{name} has its own settings"
        assert is_profile or "too_slow" not in attributes, f"{name} judges the machine"


TEXTS_FOR_PEOPLE = {"reason", "problem", "detail", "cause", "traceback", "message", "error"}
"""What holds a sentence. What is decided by it changes its meaning when somebody mends the English (``remedies``)."""


NAMES_FOR_PEOPLE = {"owner", "claimant"}
"""Fields that hold a name in words. Two may be compared with ``==``; nothing is decided by what is in one."""

KEYS_OF_SINKS = {
    ROOT / "src/headgate/cli/pipelines.py",
    ROOT / "src/headgate/connectors/fenced_sink.py",
    ROOT / "src/headgate/sim/scenarios/user_pipelines.py",
}
"""There an ``owner`` is a pipeline and a sink in one key, which is made to be taken apart."""


def test_no_sentence_for_people_is_looked_into() -> None:
    found = []
    for path, nodes in nodes_of("src").items():
        for node in nodes:
            for asked in _asked(node):
                if _last_name(asked) in TEXTS_FOR_PEOPLE:
                    found.append(f"{path.relative_to(ROOT)}:{asked.lineno} {ast.unparse(node)}")
    assert found == []


def test_no_name_for_people_is_looked_into() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{name.lineno} {ast.unparse(node)}"
        for path, nodes in nodes_of("src").items()
        for node in nodes
        for name in _looked_into(node)
        if _is_name_for_people(name) and path not in KEYS_OF_SINKS
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "is_refused"),
    [
        ("claim.owner.startswith('start over ')", True),
        ("owner.startswith((a, b))", True),
        ("beat.owner.endswith('12')", True),
        ("holder.claimant.partition(', ')[0]", True),
        ("claim.owner.lower().split()", True),
        ("'driver' in claim.owner", True),
        ("'driver' not in owner", True),
        ("re.match('driver', claim.owner)", True),
        ("claim.owner[:6]", True),
        ("claim.owner == mine", False),
        ("found.owner != ''", False),
        ("claim.owner in replaced", False),
        ("latest[fence.owner]", False),
    ],
)
def test_looking_into_a_name_for_people_is_found(code: str, is_refused: bool) -> None:
    found = [name for node in ast.walk(ast.parse(code)) for name in _looked_into(node) if _is_name_for_people(name)]
    assert bool(found) == is_refused


def _looked_into(node: ast.AST) -> list[ast.expr]:
    """Return the texts of which ``node`` asks what is in them: all but whether two are the same."""
    match node:
        case ast.Compare(ops=ops, comparators=texts):
            return [text for op, text in zip(ops, texts, strict=True) if isinstance(op, ast.In | ast.NotIn)]
        case ast.Call(func=ast.Attribute(value=ast.Name("re")), args=texts):
            return list(texts)
        case ast.Call(func=ast.Attribute(value=text, attr=verb)) if hasattr(str, verb) and verb != "encode":
            return [text]
        case ast.Subscript(value=text):
            return [text]
    return []


def _is_name_for_people(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute | ast.Name) and _last_name(node) in NAMES_FOR_PEOPLE


def _asked(node: ast.AST) -> list[ast.expr]:
    """Return what ``node`` compares, or looks into."""
    if isinstance(node, ast.Compare):
        is_identity = all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
        return [] if is_identity else [_shown(one) for one in (node.left, *node.comparators)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("startswith", "endswith", "removeprefix", "find", "index"):
            return [node.func.value]
        return node.args if node.func.attr in ("search", "match", "fullmatch", "findall") else []
    return []


def _shown(node: ast.expr) -> ast.expr:
    """Return what ``str`` makes a text of."""
    is_text = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args
    return node.args[0] if is_text else node  # type: ignore[attr-defined]


def _last_name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("GONE in error", True),
        ("GONE in str(error)", True),
        ("REFUSED.search(error.message)", True),
        ("failure.reason.startswith('no')", True),
        ("error is None", False),
        ("isinstance(error.remedy, GoBackPast)", False),
    ],
)
def test_a_look_into_a_sentence_is_found(text: str, is_refused: bool) -> None:
    asked = [_last_name(one) for node in ast.walk(ast.parse(text)) for one in _asked(node)]
    assert bool(TEXTS_FOR_PEOPLE.intersection(asked)) is is_refused


def test_no_outcome_is_decided_by_the_kind_of_a_storage() -> None:
    asked = re.compile(r"isinstance\([^)]*\b\w*Storage\b(?!Error)")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line in path.read_text().splitlines()
        if asked.search(line)
    ]
    assert found == [], "what differs between kinds of storage is said by their protocol (storage/base.py)"


def decoded_types(node: ast.AST) -> list[ast.expr]:
    """Return the type that a call of msgspec decodes, if the node is such a call."""
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("msgspec."):
        return []
    verb = ast.unparse(node.func).rpartition(".")[2]
    if verb == "convert":
        return node.args[1:]
    return [one.value for one in node.keywords if verb == "decode" and one.arg == "type"]


def test_each_type_that_msgspec_decodes_may_be_decoded_by_several_threads() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}": ast.unparse(kind)
        for path, nodes in nodes_of("src").items()
        for node in nodes
        for kind in decoded_types(node)
    }

    assert len(found) > 20
    assert {where: kind for where, kind in found.items() if not kind.startswith("decodable(")} == {}


def machines() -> list[type[Machine]]:
    for module in pkgutil.walk_packages(headgate.protocol.__path__, "headgate.protocol."):
        importlib.import_module(module.name)
    return sorted(Machine.__subclasses__(), key=lambda machine: machine.__name__)


@pytest.mark.parametrize("machine", machines(), ids=lambda machine: machine.__name__)
def test_a_machine_checks_its_invariants_after_each_event_and_its_phases_by_a_table(machine: type[Machine]) -> None:
    module = sys.modules[machine.__module__]
    assert "_check" in vars(machine), "docs: a machine has a _check of its invariants"
    assert "self._check()" in inspect.getsource(vars(machine)["handle"])
    if re.search(r"self\._phase\b", inspect.getsource(machine)):
        assert set(module.LEGAL_PHASES) == set(module.Phase)
        assigned = re.findall(r"self\._phase = (\S+)", inspect.getsource(machine))
        assert len([value for value in assigned if value != "phase"]) == 1, "only the first phase is set by hand"


def test_whatever_has_phases_has_a_table_of_those_that_follow() -> None:
    having = [
        path
        for path in sorted((ROOT / "src" / "headgate").rglob("*.py"))
        if path.parts[-2] != "sim" and re.search(r"self\._phase\b.* = Phase\.", path.read_text())
    ]
    assert len(having) > 5
    assert [str(path) for path in having if "LEGAL_PHASES" not in path.read_text()] == []


def test_names_of_test_modules_can_be_told_apart() -> None:
    """Pytest imports what lies in no package by its name alone: two of one name cannot be collected together."""
    names = [path.stem for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    assert sorted({name for name in names if names.count(name) > 1}) == []
