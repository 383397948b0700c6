import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mutants.harness import assert_caught, left_behind, patched

import headgate as hg
from headgate.api import config


def mutated():
    return patched(json, "dumps", lambda value: "[]")


def names_its_values():
    assert json.dumps({"a": 1}) == '{"a": 1}'


def looks_away():
    json.dumps({"a": 1})


def test_a_mutant_that_breaks_what_a_test_says_is_caught():
    assert_caught(mutated, names_its_values)
    names_its_values()


def patches_what_the_mutant_patches(monkeypatch):
    real = json.dumps
    monkeypatch.setattr(json, "dumps", lambda value: real(value))
    names_its_values()


def test_a_test_that_patches_the_same_does_not_put_the_mutant_back(monkeypatch):
    assert_caught(mutated, patches_what_the_mutant_patches, monkeypatch)
    monkeypatch.undo()
    names_its_values()
    assert left_behind() == []


def test_a_mutant_that_was_put_back_is_noticed(monkeypatch):
    sound = json.dumps
    with mutated():
        monkeypatch.setattr(json, "dumps", sound)
    monkeypatch.undo()
    assert left_behind() == ["json.dumps"]
    json.dumps = sound


def test_a_mutant_that_nobody_notices_survives_aloud():
    with pytest.raises(AssertionError, match="survives looks_away"):
        assert_caught(mutated, looks_away)


def test_a_mutant_of_something_that_is_gone_says_so():
    with pytest.raises(AssertionError, match="out of date"), patched(json, "no_such_thing", None):
        pass


@given(st.integers())
@settings(max_examples=3, database=None)
def draws(number):
    DRAWN.append(number)
    assert json.dumps({"a": 1}) == '{"a": 1}'


DRAWN = []


def test_what_is_drawn_for_a_mutant_is_drawn_alike():
    runs = []
    for _ in range(2):
        DRAWN.clear()
        with pytest.raises(AssertionError, match="survives draws"):
            assert_caught(changing_nothing, draws)
        runs.append(list(DRAWN))
    assert runs[0] == runs[1]
    assert getattr(draws, "_hypothesis_internal_use_seed", None) is None


def changing_nothing():
    return patched(json, "loads", json.loads)


def counts_on_the_product():
    hg.Checkpointing(timeout="1s")


def test_a_mutant_that_stumbles_is_out_of_date():
    with pytest.raises(AssertionError, match="the mutant is out of date: its own code raised AttributeError"):
        assert_caught(stumbling, counts_on_the_product)


def stumbling():
    def positive(value_ms, what):
        return value_ms.no_such_thing

    return patched(config, "_positive", positive)


def test_a_time_limit_finds_no_mutant():
    """A test that hangs until its limit ends it has noticed nothing."""

    def hangs():
        pytest.fail("Timeout (>300.0s) from pytest-timeout.")

    with pytest.raises(pytest.fail.Exception, match="Timeout"):
        assert_caught(changing_nothing, hangs)
