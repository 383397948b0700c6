"""Runs the tests nearest to a module: those of the mirrored path, and those that import it.

Usage: ``python scripts/test_near.py src/headgate/PACKAGE/MODULE.py [pytest options]``.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headgate"
TESTS = ROOT / "tests"


def imported_by(test: Path) -> set[str]:
    """Return the dotted names that a test file imports: modules, and names in modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(test.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def tests_near(module: Path) -> list[Path]:
    """Return the test files of a module, the mirrored one first."""
    inner = module.resolve().relative_to(SOURCE).with_suffix("")
    name = ".".join(("headgate", *inner.parts)).removesuffix(".__init__")
    mirrored = TESTS / inner.parent / f"test_{inner.name}.py"
    near = [path for path in sorted(TESTS.rglob("test_*.py")) if path != mirrored and name in imported_by(path)]
    return [mirrored, *near] if mirrored.exists() else near


def main() -> int:
    """Run them; return how pytest ended."""
    module = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if module is None or not module.is_file() or not module.resolve().is_relative_to(SOURCE):
        print("Error: name a file below src/headgate: make test-near FILE=src/headgate/...", file=sys.stderr)
        return 2
    near = tests_near(module)
    if not near:
        print(f"Error: no test imports {module}; add tests/PACKAGE/test_{module.stem}.py", file=sys.stderr)
        return 2
    print("\n".join(str(path.relative_to(ROOT)) for path in near), flush=True)
    marks = ["-m", "not spark and not crash"]
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *marks, *sys.argv[2:], *near], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
