"""A wheel and an sdist as people get them, and an environment in which nothing but the wheel is installed.

What the wheel requires is linked there from this environment, for all that ``pip`` then has to say about it: to install
half a gigabyte takes a minute. ``make test-deep`` takes it from the registry.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Sequence
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.conftest import IS_DEEP

from headgate.spark.prerequisites import JVM_OPTIONS

ROOT = Path(__file__).parents[2]
INSTALL = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


QUICK = {JVM_OPTIONS: os.environ.get(JVM_OPTIONS, ""), "HEADGATE_PREPARE": "never"}
"""Where the classes of Spark are that its many starts share (``tests.crash.support.class_archive``), and no others."""


def ran(command: Sequence[str | Path], directory: Path) -> str:
    """Run it there, with nothing of this environment; return what it printed."""
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(Path.home()), "LANG": "C.UTF-8", **QUICK}
    told = subprocess.run(
        [str(part) for part in command], cwd=directory, env=environment, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


def environment_with(package: Path | str, directory: Path, *options: str) -> Path:
    """Return the Python of a new environment with ``package``, and what it requires as it was tested."""
    python = empty_environment(directory)
    ran([python, *INSTALL, *options, "-c", ROOT / "constraints.txt", package], directory)
    return python


def empty_environment(directory: Path) -> Path:
    venv.create(directory, with_pip=True)
    return directory / "bin" / "python"


def link_requirements(wheel: Path, python: Path) -> None:
    """Link the packages that ``wheel`` requires, and those that they require, into the environment of ``python``."""
    (place,) = (python.parents[1] / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        required = Parser().parsestr(opened.read(name).decode()).get_all("Requires-Dist", [])
    waiting, linked = needed(required), set[str]()
    while waiting:
        if (name := waiting.pop()) not in linked:
            linked.add(name)
            found = distribution(name)
            waiting += needed(found.requires or [])
            for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
                (place / top).symlink_to(Path(str(found.locate_file(top))))


def needed(requirements: Iterable[str]) -> list[str]:
    """Return the names of those that hold here, without an extra."""
    read = [Requirement(one) for one in requirements]
    return [canonicalize_name(one.name) for one in read if one.marker is None or one.marker.evaluate({"extra": ""})]


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
    directory = tmp_path_factory.mktemp("installed") / "env"
    if IS_DEEP:
        python = environment_with(built[0], directory)
    else:
        python = empty_environment(directory)
        link_requirements(built[0], python)
        ran([python, *INSTALL, "--no-index", "-c", ROOT / "constraints.txt", built[0]], ROOT)  # or it lacks something
    listed = json.loads(ran([python, "-m", "pip", "list", "--format=json"], ROOT))
    return Installed(python, frozenset(one["name"] for one in listed))
