"""The check of names in ``make lint``."""

from __future__ import annotations

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
