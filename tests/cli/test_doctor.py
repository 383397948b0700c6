from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from headgate.cli import doctor
from headgate.cli.doctor import Verdict


def test_every_finding_is_one_line(tmp_path: Path) -> None:
    findings = doctor.examine(str(tmp_path / "checkpoints"), str(tmp_path / "store"))
    assert len(findings) == 8
    assert all("\n" not in finding.sentence for finding in findings)
    assert not list(tmp_path.iterdir()), "looking must leave nothing behind"


def test_an_old_python_is_missing() -> None:
    assert doctor.check_python((3, 10, 4)).verdict is Verdict.MISSING
    assert doctor.check_python((3, 11, 0)).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        ('openjdk version "17.0.15" 2025-04-15', Verdict.OK),
        ('openjdk version "21" 2023-09-19', Verdict.OK),
        ('java version "1.8.0_392"', Verdict.MISSING),
        ('openjdk version "11.0.2"', Verdict.MISSING),
        ("nonsense", Verdict.MISSING),
    ],
)
def test_java_is_judged_by_its_major_version(told: str, verdict: Verdict) -> None:
    assert doctor.judge_java(told, "java", "install it").verdict is verdict


def test_a_machine_without_java_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = doctor.check_java()
    assert finding.verdict is Verdict.MISSING
    assert "apt-get install openjdk-17-jre-headless" in finding.sentence


def test_a_java_home_without_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    finding = doctor.check_java()
    assert finding.verdict is Verdict.MISSING
    assert str(tmp_path) in finding.sentence


def test_missing_and_old_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        return ["no-such-package>=1", "polars>=999", 'optional-thing>=1; extra == "dev"']

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    finding = doctor.check_packages()
    assert finding.verdict is Verdict.MISSING
    assert "no-such-package is not installed; polars is" in finding.sentence
    assert "optional-thing" not in finding.sentence


def test_an_unwritable_directory_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    assert doctor.check_directory("store directory", str(tmp_path / "new" / "deep")).verdict is Verdict.OK
    finding = doctor.check_directory("store directory", str(file / "below"))
    assert finding.verdict is Verdict.MISSING
    assert "choose another one" in finding.sentence
    assert os.listdir(tmp_path) == ["file"]


# SE6
def test_a_directory_that_others_can_read_is_a_warning_with_the_way_out(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    found = doctor.check_directory("store directory", str(tmp_path))
    assert found.verdict is Verdict.WARNING
    assert f"other users can read it; 'chmod -R go= {tmp_path}' keeps them out." in found.sentence
    below = doctor.check_directory("store directory", str(tmp_path / "not-there-yet"))
    assert below.verdict is Verdict.OK
