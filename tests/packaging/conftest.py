"""A wheel and an sdist as people get them, and an environment in which nothing but the wheel is installed."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
INSTALL = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def ran(command: Sequence[str | Path], directory: Path) -> str:
    """Run it there, with nothing of this environment; return what it printed."""
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(Path.home()), "LANG": "C.UTF-8"}
    told = subprocess.run(
        [str(part) for part in command], cwd=directory, env=environment, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


def environment_with(package: Path | str, directory: Path, *options: str) -> Path:
    """Return the Python of a new environment with ``package``, and what it requires as it was tested."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    ran([python, *INSTALL, *options, "-c", ROOT / "constraints.txt", package], directory)
    return python


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the wheel, which is made from the sdist, and the sdist."""
    directory = tmp_path_factory.mktemp("built")
    ran([sys.executable, "-m", "build", "--outdir", directory, ROOT], directory)
    (wheel,), (sdist,) = directory.glob("*.whl"), directory.glob("*.tar.gz")
    return wheel, sdist


class Installed(NamedTuple):
    """An environment with the wheel, and the names of all packages that were in it at first."""

    python: Path
    packages: frozenset[str]


@pytest.fixture(scope="session")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Return an environment with the wheel, and nothing but what it requires."""
    python = environment_with(built[0], tmp_path_factory.mktemp("installed") / "env")
    listed = json.loads(ran([python, "-m", "pip", "list", "--format=json"], ROOT))
    return Installed(python, frozenset(one["name"] for one in listed))
