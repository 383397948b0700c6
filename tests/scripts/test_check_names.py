"""The check of names in ``make lint``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "scripts")
    import check_names


def test_modules_named_by_verb_forms_and_docstrings_in_riddles_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"preparing": "What nobody was told.", "heartbeat": "A beat.", "scaling": "A scale."}.items():
        (tmp_path / f"{name}.py").write_text(f'"""{text}"""\n')
    monkeypatch.setattr(check_names, "SOURCE", tmp_path)
    monkeypatch.setattr(check_names, "ROOT", tmp_path)
    (module,) = check_names.module_names()
    assert module.startswith("preparing.py: name it by a noun")
    (words,) = check_names.docstring_words()
    assert words.endswith("preparing.py (2), heartbeat.py (0), scaling.py (0)")
    assert "2 of 8 words" in capsys.readouterr().out


def test_long_subjects_are_found_also_in_a_shallow_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, shallow = tmp_path / "made", tmp_path / "shallow"
    long = "Say " + "a " * 40 + "lot"
    git(tmp_path, "init", "-q", str(made))
    for subject in (long, "Say little", "Say less"):
        git(made, "commit", "-q", "--allow-empty", "-m", subject)
    git(tmp_path, "clone", "-q", "--depth", "2", f"file://{made}", str(shallow))
    monkeypatch.setattr(check_names, "ROOT", made)
    (problem,) = check_names.commit_subjects()
    assert problem.endswith(f"its subject has {len(long)} characters, 72 at most: {long}")
    monkeypatch.setattr(check_names, "ROOT", shallow)
    assert not list(check_names.commit_subjects()), "its history does not reach back to the long one"
    monkeypatch.setattr(check_names, "ROOT", tmp_path)
    assert not list(check_names.commit_subjects()), "no repository"


def git(directory: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True)
