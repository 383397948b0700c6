"""Mutants of what becomes of state when a program changes: what is lost, taken for something else, or not refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from tests.model import test_evolution as types
from tests.mutants.harness import assert_caught, patched
from tests.operators.checkpointed import test_changed_lists as lists
from tests.operators.process import test_changed_functions as functions
from tests.protocol.checkpoints import test_judged_states as judging
from tests.state import test_evolving as states

from headgate.model import evolution as model
from headgate.model.evolution import NO_RULES, Fields, Kept, Misfit, StateRules
from headgate.operators.checkpointed.lists import OperatorLists
from headgate.operators.process.spec import StatefulFunctionSpec
from headgate.protocol.checkpoints import evolution as protocol
from headgate.protocol.checkpoints import recovery
from headgate.protocol.checkpoints.evolution import Judged
from headgate.state import backend, evolving
from headgate.state.evolution import Evolution

Patch = AbstractContextManager[None]


def whole_numbers_of_64_bits_become_floats() -> Patch:
    return patched(model, "_EXACT_BITS", {"float": 24, "double": 64})


def unsigned_numbers_become_signed_ones_of_the_same_size() -> Patch:
    is_widening = model.is_widening
    return patched(model, "is_widening", lambda old, new: is_widening(old, new) or old == f"u{new}")


def a_decimal_may_lose_digits_before_the_point() -> Patch:
    def is_wider(old: str, new: str) -> bool:
        before, after = model._DECIMAL.fullmatch(old), model._DECIMAL.fullmatch(new)
        return before is not None and after is not None and int(after[1]) >= int(before[1])

    return patched(model, "is_wider_decimal", is_wider)


def an_added_field_is_null_unasked() -> Patch:
    source = model._source

    def found(name: Any, path: Any, before: Any, place: Any) -> Any:
        one = source(name, path, before, place)
        return None if isinstance(one, Misfit) and "no default" in one.why else one

    return patched(model, "_source", found)


def a_renamed_field_wins_over_the_one_that_is_there() -> Patch:
    source = model._source

    def found(name: Any, path: Any, before: Any, place: Any) -> Any:
        one = source(name, path, before, place)
        former = place.rules.former_path(path)
        return former.rpartition(".")[2] if isinstance(one, Misfit) and "both" in one.why else one

    return patched(model, "_source", found)


def fields_are_taken_by_their_place() -> Patch:
    of_structs = model._of_structs

    def by_place(old: Any, new: Any, place: Any) -> Any:
        found = of_structs(old, new, place)
        if not isinstance(found, Fields) or len(old.fields) != len(new.fields):
            return found
        taken = [replace(one, old=name) for one, (name, _) in zip(found.fields, old.fields, strict=True)]
        return replace(found, fields=tuple(taken))

    return patched(model, "_of_structs", by_place)


def the_key_of_a_record_is_widened() -> Patch:
    conversion_of = model.conversion_of
    return patched(protocol, "conversion_of", lambda old, new, rules=NO_RULES, fixed=(): conversion_of(old, new, rules))


def the_keys_of_a_map_change() -> Patch:
    state = protocol._state
    return patched(
        protocol, "_state", lambda case, old, new, said: state(case, replace(old, key_type=new.key_type), new, said)
    )


def a_state_that_is_gone_is_left_behind_unasked() -> Patch:
    return patched(protocol, "_lost", lambda case, state: Judged())


def a_state_that_is_new_starts_empty_unasked() -> Patch:
    return patched(StateRules, "starts_empty", True)


def a_list_becomes_a_value() -> Patch:
    state = protocol._state
    return patched(protocol, "_state", lambda case, old, new, said: state(case, replace(old, kind=new.kind), new, said))


def what_was_said_is_not_asked_for() -> Patch:
    judged = recovery.judged
    return patched(
        recovery, "judged", lambda name, here, old, now, rules: judged(name, here, old, now, model.NO_OPERATOR_RULES)
    )


def whatever_the_bytes_say_is_taken_for_the_declared_type() -> Patch:
    return patched(backend, "evolving", lambda found, section, where: evolving.Evolving(section, Kept()))


def the_former_name_is_not_looked_for() -> Patch:
    return patched(backend, "section_data", lambda sections, section, path: sections.get(section.name))


def nulls_of_structs_become_structs_of_nulls() -> Patch:
    struct = evolving._struct

    def without_nulls(values: Any, dtype: Any, conversion: Any, defaults: Any) -> Any:
        made = struct(values, dtype, conversion, defaults)
        return (
            pa.StructArray.from_arrays([made.field(at) for at in range(len(dtype))], fields=list(dtype))
            if len(dtype)
            else made
        )

    return patched(evolving, "_struct", without_nulls)


def defaults_are_null() -> Patch:
    field = evolving._field
    return patched(
        evolving, "_field", lambda values, one, dtype, defaults: field(values, one, dtype, dict.fromkeys(defaults))
    )


def elements_of_lists_stay_as_they_were() -> Patch:
    return patched(OperatorLists, "_shares", _shares_unchanged)


def _shares_unchanged(self: Any, descriptor: Any, values: Any) -> Any:
    kept = [
        part for name in (descriptor.name, descriptor.evolution.renamed_from) for part in self.restored.get(name, [])
    ]
    everybodys = [values.store(one) for part in kept for one in part.elements.to_pylist()]
    return everybodys, everybodys


def forgotten_states_are_not_remembered() -> Patch:
    rules = StatefulFunctionSpec.state_rules
    return patched(StatefulFunctionSpec, "state_rules", lambda self: replace(rules(self), forgotten=frozenset()))


def any_evolution_fits() -> Patch:
    return patched(Evolution, "check", lambda self, where, dtype: None)


CASES: list[tuple[Callable[[], Patch], Callable[..., Any], tuple[Any, ...]]] = [
    (
        whole_numbers_of_64_bits_become_floats,
        types.test_a_number_becomes_a_wider_one_and_nothing_else_becomes_anything,
        ("int64", "double"),
    ),
    (
        unsigned_numbers_become_signed_ones_of_the_same_size,
        types.test_a_number_becomes_a_wider_one_and_nothing_else_becomes_anything,
        ("uint32", "int32"),
    ),
    (
        a_decimal_may_lose_digits_before_the_point,
        types.test_a_decimal_becomes_one_with_more_digits_and_keeps_its_value,
        ((10, 2), (11, 4), False),
    ),
    (an_added_field_is_null_unasked, types.test_an_added_field_needs_a_default, ()),
    (a_renamed_field_wins_over_the_one_that_is_there, types.test_two_fields_never_become_one, ()),
    (fields_are_taken_by_their_place, states.test_nulls_stay_where_they_are_at_every_level, ()),
    (the_key_of_a_record_is_widened, judging.test_keys_never_change, ()),
    (the_keys_of_a_map_change, judging.test_keys_never_change, ()),
    (
        a_state_that_is_gone_is_left_behind_unasked,
        judging.test_a_state_is_renamed_added_and_left_behind_only_by_a_word,
        (),
    ),
    (
        a_state_that_is_new_starts_empty_unasked,
        judging.test_a_state_is_renamed_added_and_left_behind_only_by_a_word,
        (),
    ),
    (
        a_list_becomes_a_value,
        judging.test_another_type_is_refused_with_operator_state_both_types_and_what_to_do,
        (),
    ),
    (
        what_was_said_is_not_asked_for,
        judging.test_an_operator_without_state_may_be_given_one_that_starts_empty,
        (),
    ),
    (
        whatever_the_bytes_say_is_taken_for_the_declared_type,
        states.test_a_type_that_the_manifest_did_not_tell_is_refused_by_the_bytes,
        ("row",),
    ),
    (the_former_name_is_not_looked_for, states.test_a_state_is_found_under_the_name_that_it_had, ("memory", "row")),
    (nulls_of_structs_become_structs_of_nulls, states.test_nulls_stay_where_they_are_at_every_level, ()),
    (defaults_are_null, functions.test_a_changed_function_reads_what_the_one_before_had_put, (functions.ByRow,) * 2),
    (
        elements_of_lists_stay_as_they_were,
        lists.test_elements_of_a_list_are_converted_under_the_name_that_it_had,
        (False,),
    ),
    (
        forgotten_states_are_not_remembered,
        functions.test_what_is_said_is_in_the_spec_and_not_in_the_identity,
        (functions.ByRow,),
    ),
    (
        any_evolution_fits,
        functions.test_a_wrong_evolution_is_an_error_when_the_pipeline_is_built,
        (functions.ByRow, lambda s: s.value("now", functions.NEW, evolution=Evolution({"d": 1})), "names the field"),
    ),
]


@pytest.mark.parametrize(("mutant", "test", "given"), CASES, ids=[mutant.__name__ for mutant, _, _ in CASES])
def test_a_mutant_of_evolution_is_caught(
    mutant: Callable[[], Patch], test: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    assert_caught(mutant, test, *given)
