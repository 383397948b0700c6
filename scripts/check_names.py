"""Checks that the code keeps the words of the field: names of modules, docstrings, subjects of commits.

Run by ``make lint``. A module is named by a noun: a name that ends like a verb form is refused unless ``NOUNS`` has it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headgate"
SIMULATOR = SOURCE / "sim"

VERB_FORM = re.compile(r"(?:ing|ed|ly)$")
NOUNS = {
    "encoding",
    "feed",
    "induced",
    "opening",
    "packing",
    "pending",
    "routing",
    "scaling",
    "settings",
    "testing",
    "tracking",
    "typing",
    "unaligned",
    "unsupported",
}
"""Last words of module names that end like a verb form and are what the field says."""

RIDDLES = re.compile(r"\b(?:nobody|somebody|whoever|whose|behind|told|anew)\b", re.IGNORECASE)
RIDDLES_MAX = 10
"""In 10,000 words of docstrings."""

SUBJECT_CHARS_MAX = 72
SUBJECTS_SINCE = "2026-11-28T18:00"


def module_names() -> Iterator[str]:
    """Yield a problem for each module of the product that is not named by a noun."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.parent.name if path.stem == "__init__" else path.stem
        last = name.rpartition("_")[2]
        if VERB_FORM.search(last) and last not in NOUNS and not name.startswith("__"):
            hint = f"name it by a noun of the field, or add '{last}' to NOUNS in scripts/check_names.py"
            yield f"{path.relative_to(ROOT)}: {hint}"


def docstrings(path: Path) -> Iterator[str]:
    """Yield every docstring of a file: of modules, classes, functions, and strings below an assignment."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def docstring_words() -> Iterator[str]:
    """Yield a problem if docstrings speak in riddles more often than RIDDLES_MAX."""
    words = 0
    found: Counter[Path] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        for text in docstrings(path):
            words += len(text.split())
            found[path] += len(RIDDLES.findall(text))
    rate = 10_000 * found.total() / words
    print(f"{found.total()} of {words:,} words of docstrings are riddles: {rate:.1f} in 10,000, {RIDDLES_MAX} at most")
    if rate > RIDDLES_MAX:
        worst = ", ".join(f"{path.relative_to(SOURCE)} ({count})" for path, count in found.most_common(8))
        yield f"say in the field's words what the docstrings say with {RIDDLES.pattern}: {worst}"


def methods() -> Iterator[str]:
    """Yield a problem for each public method that no class describes."""
    described: set[str] = set()
    bare: list[tuple[str, str]] = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for part in node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else ():
                if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) or part.name.startswith("_"):
                    continue
                if ast.get_docstring(part):
                    described.add(part.name)
                elif SIMULATOR not in path.parents:
                    bare.append((part.name, f"{path.relative_to(ROOT)}:{part.lineno}"))
    for name, place in bare:
        if name not in described:
            yield f"{place}: say in a docstring what '{name}' does"


def commit_subjects() -> Iterator[str]:
    """Yield a problem for each recent commit with a subject that is too long.

    Merges are left out: their subject is generated. In a shallow clone the commits that are there are checked; without
    git, or outside a repository, none are.
    """
    log = ["git", "log", "--no-merges", f"--since={SUBJECTS_SINCE}", "--format=%h %s"]
    try:
        lines = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return
    for line in lines:
        commit, _, subject = line.partition(" ")
        if len(subject) > SUBJECT_CHARS_MAX:
            yield f"{commit}: its subject has {len(subject)} characters, {SUBJECT_CHARS_MAX} at most: {subject}"


def main() -> int:
    """Print what is wrong; return how the process ends."""
    problems = [*module_names(), *docstring_words(), *methods(), *commit_subjects()]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
