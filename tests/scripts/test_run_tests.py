"""What is said at the end of ``make test``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "scripts")
    import run_tests

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="good"/>
<testcase classname="a" name="bad"><failure message="no">text</failure></testcase>
<testcase classname="a" name="broken"><error message="no">text</error></testcase>
<testcase classname="a" name="left"><skipped message="needs Java">text</skipped></testcase>
<testcase classname="b" name="left"><skipped message="needs Java">text</skipped></testcase>
</testsuite></testsuites>"""


def test_the_last_line_has_the_numbers_and_the_lines_above_say_what_failed_and_was_skipped(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    totals = run_tests.Totals()
    run_tests.read_report(tmp_path / "report.xml", totals)
    assert run_tests.summary(totals).splitlines() == [
        "failed: a::bad: no",
        "failed: a::broken: no",
        "skipped 2: needs Java",
        "1 passed, 2 failed, 2 skipped",
    ]


def test_both_halves_are_shown_and_one_that_fails_does_not_end_the_other(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    programs = {"quick": "print('bad'); exit(1)", "spark": "print('good')"}

    def begin(name: str, workers: str, archive: str) -> subprocess.Popen[str]:
        assert archive == "-Dshared"
        assert workers == {"quick": "4", "spark": "3"}[name]
        return subprocess.Popen([sys.executable, "-c", programs[name]], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(run_tests, "compile_tests", lambda: None)
    monkeypatch.setattr(run_tests, "class_archive", lambda: "-Dshared")
    monkeypatch.setattr(run_tests, "begin_half", begin)
    assert run_tests.run_halves(["4", "3"]) == [1, 0]
    assert sorted(capfd.readouterr().out.splitlines()) == ["quick: bad", "spark: good"]


def test_tests_are_compiled_once_and_again_when_they_were_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    module = tmp_path / "tests" / "test_one.py"
    module.parent.mkdir()
    module.write_text("def test_one(): assert True")
    compiling = run_tests.compile_tests()
    assert compiling is not None
    assert compiling.wait() == 0
    assert run_tests.compile_tests() is None
    written = module.stat().st_mtime
    os.utime(module, (written + 60, written + 60))
    assert not run_tests.is_compiled(module)
