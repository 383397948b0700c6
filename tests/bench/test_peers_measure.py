"""Running peers as processes: the last line, failures, time-outs, peers that are missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bench.peers import measure
from bench.peers.flink_sql import rate_of
from bench.peers.measure import NotInstalled, PeerFailedError, end_group, last_object, measure_flink, run_peer

PYTHON = Path(sys.executable)


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a module ``stand_in`` that ``run_peer`` can run."""
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    return tmp_path / "stand_in.py"


def test_the_last_line_is_the_result_and_noise_before_it_is_ignored(peer: Path) -> None:
    peer.write_text("import json, sys\nprint('noise {')\nprint(json.dumps({'arguments': sys.argv[1:]}))\n")
    assert run_peer(PYTHON, "stand_in", ["--keys", "5"]) == {"arguments": ["--keys", "5"]}


def test_a_peer_that_fails_is_named_with_its_last_words(peer: Path) -> None:
    peer.write_text("import sys\nsys.exit('no Java here')\n")
    with pytest.raises(PeerFailedError, match=r"stand_in ended with status 1:\nno Java here"):
        run_peer(PYTHON, "stand_in", [])


def test_a_peer_that_hangs_is_an_error_after_its_time(peer: Path) -> None:
    peer.write_text("import signal\nsignal.pause()\n")
    with pytest.raises(PeerFailedError, match="stand_in did not end within 1 s"):
        run_peer(PYTHON, "stand_in", [], timeout_seconds=1)


def test_ending_a_peer_ends_what_it_started() -> None:
    grandchild = "import signal; print('up', flush=True); signal.pause()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with subprocess.Popen([PYTHON, "-c", child], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        end_group(process)
        # The pipe ends only when the last process that could write to it is gone.
        assert process.stdout.read() == b""


def test_files_a_peer_leaves_behind_are_gone(peer: Path) -> None:
    peer.write_text("import json, tempfile\nprint(json.dumps({'left': tempfile.mkdtemp()}))\n")
    assert not Path(run_peer(PYTHON, "stand_in", [])["left"]).exists()


@pytest.mark.parametrize("printed", ["", "\n", "not json", "[1]", '{"a": 1}\nbye'])
def test_output_without_an_object_on_its_last_line_is_refused(printed: str) -> None:
    with pytest.raises(PeerFailedError, match="no JSON object on its last line"):
        last_object(printed, "stand_in")


def test_a_missing_flink_is_one_clear_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "environment_python", lambda: tmp_path / "bin" / "python")
    assert measure_flink(10) == NotInstalled("Flink SQL is not installed: run `make bench-peers`")


def test_rate_runs_from_the_first_look_to_the_last() -> None:
    assert rate_of([(10.0, 500), (11.0, 900), (12.0, 2_500)]) == 1_000
    with pytest.raises(ValueError, match="two looks"):
        rate_of([(1.0, 5)])
