"""Names that users choose are matched as a whole: a line end at the end of one is no part of any name."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

import headgate as hg
from headgate.errors import UsageError
from headgate.model.config import duration_ms
from headgate.store.store import Store

SOURCES = sorted((Path(__file__).parents[1] / "src").rglob("*.py"))


def named_pipeline(name: str, root: Path) -> None:
    hg.Pipeline(name, checkpointing=hg.Checkpointing(dir=root))


def named_node(name: str, root: Path) -> None:
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(dir=root))
    pipeline.source(hg.FromRows([{"id": 1}])).sink(hg.Discard(), name=name)


def named_stream(name: str, root: Path) -> None:
    with Store.open(root) as store:
        store.create_stream(name, hg.FromRows([{"id": 1}]).schema())


def named_files(name: str, root: Path) -> None:
    hg.FileSink(root, prefix=name)


USES = [named_pipeline, named_node, named_stream, named_files]


@pytest.mark.parametrize("use", USES)
def test_a_name_that_ends_in_a_line_end_is_refused(tmp_path: Path, use: Callable[[str, Path], None]) -> None:
    use("sound", tmp_path)
    with pytest.raises(UsageError):
        use("sound\n", tmp_path)


def test_a_duration_that_is_followed_by_more_is_refused() -> None:
    with pytest.raises(UsageError):
        duration_ms("1s\nmore")


def test_no_pattern_ends_in_a_dollar_sign() -> None:
    """``$`` matches before a line end, too; ``fullmatch`` does not."""
    patterns = [(path.name, text) for path in SOURCES for text in patterns_of(path)]
    assert len(patterns) >= 8
    assert [(name, text) for name, text in patterns if text.endswith("$")] == []


def patterns_of(path: Path) -> list[str]:
    return [
        str(node.args[0].value)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "re"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]
