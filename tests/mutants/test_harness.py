import json

import pytest
from tests.mutants.harness import assert_caught, patched


def mutated():
    return patched(json, "dumps", lambda value: "[]")


def names_its_values():
    assert json.dumps({"a": 1}) == '{"a": 1}'


def looks_away():
    json.dumps({"a": 1})


def test_a_mutant_that_breaks_what_a_test_says_is_caught():
    assert_caught(mutated, names_its_values)
    names_its_values()


def test_a_mutant_that_nobody_notices_survives_aloud():
    with pytest.raises(AssertionError, match="survives looks_away"):
        assert_caught(mutated, looks_away)


def test_a_mutant_of_something_that_is_gone_says_so():
    with pytest.raises(AssertionError, match="out of date"), patched(json, "no_such_thing", None):
        pass
