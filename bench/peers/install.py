"""Installs the peers of the benchmarks into environments of their own: ``make bench-peers``.

PyFlink needs other versions of pyarrow and numpy than Headgate or Pathway, so none shares an environment.
Structured Streaming is part of the project's own environment and needs nothing here. Standard library only,
so that any Python can run it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-peers"
PATHWAY_ENVIRONMENT = ROOT / ".venv-peers-pathway"
KAFKA_ENVIRONMENT = ROOT / ".venv-peers-kafka"
REQUIREMENTS = {
    ENVIRONMENT: Path(__file__).with_name("requirements.txt"),
    PATHWAY_ENVIRONMENT: Path(__file__).with_name("requirements-pathway.txt"),
    KAFKA_ENVIRONMENT: Path(__file__).with_name("requirements-kafka.txt"),
}
BROKER_POM = Path(__file__).with_name("kafka-pom.xml")
CONNECTORS_POM = Path(__file__).with_name("connectors-pom.xml")
CONNECTORS = KAFKA_ENVIRONMENT / "connectors"
PARQUET_POM = Path(__file__).with_name("parquet-pom.xml")
PARQUET = ENVIRONMENT / "parquet"

PYTHONS = ((3, 11), (3, 12), (3, 10))
"""Versions of Python that all peers support, the preferred first."""


def environment_python(environment: Path = ENVIRONMENT) -> Path:
    """Return the interpreter of the peers' environment, whether it exists or not."""
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def interpreter() -> str | None:
    """Return a Python that the peers support: the running one if possible, else one found on the path."""
    if sys.version_info[:2] in PYTHONS:
        return sys.executable
    for major, minor in PYTHONS:
        found = shutil.which(f"python{major}.{minor}")
        if found and _runs(found):
            return found
    return None


def install(environment: Path = ENVIRONMENT) -> str | None:
    """Create the environment and install its pinned peers; return what prevented it, or None.

    Running it again brings an existing environment up to the pinned versions.
    """
    python = interpreter()
    if python is None:
        supported = ", ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        return f"the peers need Python {supported} and none of them was found on the path"
    if not environment_python(environment).exists():
        if python == sys.executable:
            venv.create(environment, with_pip=True)
        else:
            subprocess.run([python, "-m", "venv", str(environment)], check=True)
    requirements = REQUIREMENTS[environment]
    command = [str(environment_python(environment)), "-m", "pip", "install", "--quiet", "-r", str(requirements)]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        return f"pip could not install {requirements.name}: {_last_line(finished.stderr)}"
    return None


def broker_of(environment: Path) -> Path:
    """Return where the broker of Kafka is, whether it is there or not."""
    return environment / "broker"


def streaming_connector() -> list[Path]:
    """Return the jars of Structured Streaming's connector for Kafka; none if they are not there."""
    names = ("spark-sql-kafka-*", "spark-token-provider-kafka-*", "kafka-clients-*", "commons-pool2-*")
    return [jar for name in names for jar in sorted(CONNECTORS.glob(f"{name}.jar"))]


def flink_connector() -> list[Path]:
    """Return the jars of Flink's connector for Kafka, which comes without zstd; none if it is not there."""
    found = sorted(CONNECTORS.glob("flink-sql-connector-kafka-*.jar"))
    return [*found, *sorted(broker_of(KAFKA_ENVIRONMENT).glob("zstd-jni-*.jar"))] if found else []


def flink_parquet() -> list[Path]:
    """Return the jars with which Flink reads Parquet; none if they are not there."""
    found = sorted(PARQUET.glob("*.jar"))
    return found if any(jar.name.startswith("flink-sql-parquet-") for jar in found) else []


def copy_jars(pom: Path, directory: Path) -> str | None:
    """Have Maven copy what ``pom`` names into ``directory``; return what prevented it, or None."""
    maven = shutil.which("mvn")
    if maven is None:
        return "it comes by Maven, which is not there ('apt-get install maven')"
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={directory}"]
    finished = subprocess.run([maven, "-q", "-B", "-f", str(pom), *goal], capture_output=True, text=True)
    if finished.returncode:
        return f"Maven could not get {pom.name}: {_last_line(finished.stdout + finished.stderr)}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Install and say in one sentence how it went; 0 also when a peer cannot be installed here."""
    if arguments:
        print("install.py takes no arguments; it installs what the requirements beside it name")
        return 2
    peers = ((ENVIRONMENT, "Flink SQL"), (PATHWAY_ENVIRONMENT, "Pathway"), (KAFKA_ENVIRONMENT, "Kafka"))
    for environment, peer in peers:
        problem = install(environment)
        if environment == ENVIRONMENT:
            problem = problem or copy_jars(PARQUET_POM, PARQUET)
        if environment == KAFKA_ENVIRONMENT:
            problem = problem or copy_jars(BROKER_POM, broker_of(environment)) or copy_jars(CONNECTORS_POM, CONNECTORS)
        if problem:
            print(f"{peer} will be missing from the benchmarks: {problem}")
        else:
            print(f"{peer} is installed in {environment.name}/")
    return 0


def _runs(python: str) -> bool:
    # A version manager's stand-in is on the path even for versions that are not enabled.
    return subprocess.run([python, "--version"], capture_output=True).returncode == 0


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
