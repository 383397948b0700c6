"""No message that a user may read names a rule of the specification, or has a placeholder in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import headgate

ROOT = Path(headgate.__file__).parent
RULE = re.compile(r"\b[A-Z]{1,3}[0-9]{1,3}\b")
PLACEHOLDER = re.compile(r"<[a-z_ ]+>")
FOR_USERS = {"UsageError", "StorageError", "CorruptionError", "PipelineFailed", "FencedError", "not_there_yet", "note"}


def messages(tree: ast.Module) -> Iterator[ast.Constant]:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            called = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            if called in FOR_USERS:
                for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                    yield from (part for part in ast.walk(argument) if isinstance(part, ast.Constant))


def modules() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] != "sim"]


def test_no_message_needs_the_specification_to_be_understood() -> None:
    riddles = [
        f"{path}:{part.lineno}: {part.value}"
        for path in modules()
        for part in messages(ast.parse(path.read_text()))
        if isinstance(part.value, str) and (RULE.search(part.value) or PLACEHOLDER.search(part.value))
    ]
    assert riddles == []


def test_a_riddle_is_found() -> None:
    tree = ast.parse('raise UsageError(f"give it to {x} (S12)")')
    assert any(RULE.search(str(part.value)) for part in messages(tree))
