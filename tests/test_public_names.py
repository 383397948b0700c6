"""One table has the public names of a package: what repeats them for type checkers and readers agrees with it."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import headgate as hg
from headgate import testing
from headgate.api.unsupported import NAMES_TO_COME
from headgate.call_errors import OPTIONS_TO_COME
from headgate.public_names import PublicNames

PACKAGES = [hg, testing]
README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def table_of(package: ModuleType) -> set[tuple[str, str]]:
    table: dict[str, str] = package.PUBLIC_NAMES
    return {(module, name) for module, names in table.items() for name in names.split()}


def imports_for_type_checkers(package: ModuleType) -> set[tuple[str, str]]:
    tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in blocks[0].body if isinstance(node, ast.ImportFrom)]
    assert all(one.name == one.asname for node in imports for one in node.names), (
        "write: from module import Name as Name"
    )
    return {(str(node.module), one.name) for node in imports for one in node.names}


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_the_names_of_the_table(package: ModuleType) -> None:
    assert imports_for_type_checkers(package) == table_of(package)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_can_be_imported(package: ModuleType) -> None:
    names = {name for _, name in table_of(package)}
    assert set(package.__all__) - {"__version__"} == names
    assert [name for name in names if getattr(package, name) is None] == []
    assert set(dir(package)) == set(package.__all__)


def test_a_name_that_occurs_twice_is_noticed() -> None:
    with pytest.raises(AssertionError, match="a public name occurs twice"):
        PublicNames("package", {"one": "Name Other", "two": "Name"})


def test_no_public_name_is_one_to_come() -> None:
    assert set(NAMES_TO_COME) & set(hg.__all__) == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"{package.__name__} has no name 'Pipelin'"):
        package.Pipelin  # noqa: B018


NOT_THERE_YET: dict[str, Callable[[], object]] = {
    "Pulsar": lambda: getattr(hg, "PulsarSource"),  # noqa: B009
}
"""Words of README's table of what is not there yet, and a program that asks for it."""


@pytest.mark.parametrize("words", NOT_THERE_YET)
def test_what_readme_says_is_not_there_yet_is_refused_in_these_words(words: str) -> None:
    table = README[README.index("## What is not there yet") : README.index("## Numbers")]
    assert re.search(rf"\b{words}\b", table), f"it is refused; README's table does not say so: {words}"
    with pytest.raises((hg.UsageError, AttributeError), match=r"(is|are) not there yet"):
        NOT_THERE_YET[words]()


def test_no_option_to_come_is_one_that_a_public_class_takes() -> None:
    kinds = [value for value in (getattr(hg, name) for name in hg.__all__) if isinstance(value, type)]
    taken = {
        option
        for kind in kinds
        for name in getattr(inspect.unwrap(kind.__init__), "__annotations__", {})
        for option in (name, f"{kind.__name__}.{name}")
    }
    assert set(OPTIONS_TO_COME) & taken == set()


def test_readme_says_of_no_public_name_that_it_is_not_there_yet() -> None:
    table = README[README.index("## What is not there yet") : README.index("## Numbers")]
    assert [name for name in hg.__all__ if re.search(rf"`(hg\.|headgate\.)?{name}\b", table)] == []


def output_of(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_names_may_be_used_first_by_several_threads_at_once() -> None:
    names = "['Pipeline', 'Kafka', 'Generator', 'FileSink']"
    use = f"lambda at: [getattr(headgate, name) for name in {names}[at:] + {names}[:at]]"
    pool = f"from concurrent.futures import ThreadPoolExecutor as P; print(len(list(P(4).map({use}, range(4)))))"
    assert output_of(f"import headgate; {pool}") == "4"


def test_importing_headgate_imports_neither_spark_nor_arrow_nor_polars() -> None:
    code = "import sys, headgate; print(sorted({'pyspark', 'pyarrow', 'polars', 'numpy'} & set(sys.modules)))"
    assert output_of(code) == "[]"


def test_building_a_pipeline_does_not_import_spark() -> None:
    code = (
        "import sys, headgate as hg; p = hg.Pipeline('p'); p.source(hg.FromRows([{'n': 1}])).sink(hg.Discard()); "
        "p.definition(); print('pyspark' in sys.modules)"
    )
    assert output_of(code) == "False"


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_of_garbage_is_afterwards_as_before(is_enabled: bool) -> None:
    code = (  # of its own: other threads of this process pause it, too
        "import gc\nfrom headgate.public_names import garbage_kept\n"
        f"gc.{'enable' if is_enabled else 'disable'}()\n"
        "try:\n    with garbage_kept():\n        print(gc.isenabled())\n        raise ImportError\n"
        "except ImportError:\n    print(gc.isenabled())\n"
    )
    assert output_of(code).split() == ["False", str(is_enabled)]
