"""What is said at the end of ``make test``."""

from __future__ import annotations

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
        "failed: a::bad",
        "failed: a::broken",
        "skipped 2: needs Java",
        "1 passed, 2 failed, 2 skipped",
    ]
