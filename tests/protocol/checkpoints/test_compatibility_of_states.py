"""Whether the state of an operator fits a program that was changed: what is converted, and what is refused."""

from __future__ import annotations

import pytest
from tests.protocol.checkpoints.test_recovery import manifest

from headgate.model.schema_evolution import OperatorRules, StateRules
from headgate.protocol.checkpoints.compatibility import judged
from headgate.protocol.checkpoints.recovery import incompatibility

STRUCT = "struct<name: large_string, n: int32>"
EMPTY = OperatorRules()


def keyed(*states: str, keys: str = "user: int64") -> str:
    return f"keyed state(keys {keys}; {'; '.join(states)})"


def lists(*states: str) -> str:
    return f"operator state({'; '.join(states)})"


def rules(name: str, *, forgotten: frozenset[str] = frozenset(), **said: object) -> OperatorRules:
    return OperatorRules(((name, StateRules(**said)),), forgotten=forgotten)  # type: ignore[arg-type]


def changes(before: str, now: str, said: OperatorRules = EMPTY) -> list[str]:
    found = judged("totals", "checkpoint 7", before, now, said)
    assert found.refusal is None, found.refusal
    return list(found.changes)


def refusal(before: str, now: str, said: OperatorRules = EMPTY) -> str:
    found = judged("totals", "checkpoint 7", before, now, said)
    assert found.refusal is not None
    assert "\n" not in found.refusal
    assert ". " not in found.refusal, "one sentence"
    return found.refusal


@pytest.mark.parametrize("kind", ["value", "list"])
def test_states_of_every_kind_are_widened(kind: str) -> None:  # EV2
    assert changes(keyed(f"{kind} n: int32"), keyed(f"{kind} n: double")) == [
        "operator 'totals': in state 'n', int32 becomes double"
    ]
    assert changes(keyed("map n: int64 -> int32"), keyed("map n: int64 -> int64")) == [
        "operator 'totals': in state 'n', int32 becomes int64"
    ]


def test_another_type_is_refused_with_operator_state_both_types_and_what_to_do() -> None:  # EV1
    assert refusal(keyed("value n: int64"), keyed("value n: double")) == (
        "state 'n' of operator 'totals' is int64 in checkpoint 7, but is declared as double now: not every int64 can "
        "be kept as a double; restore the old declaration, or give the new one another name with "
        "evolution=Evolution(starts_empty=True) and call forget('n') to leave the old one behind, in a "
        "StatefulProcessor deleteIfExists('n')"
    )
    assert "is date32[day] in checkpoint 7, but is declared as timestamp[us] now" in refusal(
        keyed("value n: date32[day]"), keyed("value n: timestamp[us]")
    )
    assert "is a value of int64 in checkpoint 7, but is declared as a list of int64 now" in refusal(
        keyed("value n: int64"), keyed("list n: int64")
    )


def test_an_added_field_is_refused_with_the_way_to_give_a_default() -> None:
    new = STRUCT.replace(">", ", zip: large_string>")
    assert (
        "'zip' was added and has no default; give one with evolution=Evolution(defaults={'zip': ...}), or, if it had "
        "another name, Evolution(renamed={'...': 'zip'}), or restore the old declaration"
    ) in refusal(keyed(f"value n: {STRUCT}"), keyed(f"value n: {new}"))
    assert changes(keyed(f"value n: {STRUCT}"), keyed(f"value n: {new}"), rules("n", defaulted=frozenset({"zip"}))) == [
        "operator 'totals': in state 'n', 'zip' is added"
    ]


def test_keys_never_change() -> None:  # EV6
    before = keyed("map n: int32 -> int32")
    assert "the keys of a map never change their type" in refusal(before, keyed("map n: int64 -> int32"))
    for keys in ("user: int32", "id: int64", "user: int64, part: int64"):
        assert "keyed state(keys user: int64;" in refusal(before, keyed("map n: int32 -> int32", keys=keys))
    assert "the key column 'k' cannot change its type" in refusal(
        "reduce(keys k; columns k: int32, n: int32)", "reduce(keys k; columns k: int64, n: int32)"
    )


def test_a_state_is_renamed_added_and_left_behind_only_by_a_word() -> None:  # EV7
    before, now = keyed("value n: int32"), keyed("value total: int64")
    assert "has no such state; if it is new, give it evolution=Evolution(starts_empty=True)" in refusal(before, now)
    assert changes(before, now, rules("total", renamed_from="n")) == [
        "operator 'totals': state 'n' becomes 'total'",
        "operator 'totals': in state 'total', int32 becomes int64",
    ]
    assert refusal(before, now, rules("total", starts_empty=True)) == (
        "checkpoint 7 holds state 'n' of operator 'totals', a value of int32, which is not declared any more; declare "
        "it again, or, if it has another name now, give that one evolution=Evolution(renamed_from='n'), or call "
        "forget('n') to leave it behind, which in a StatefulProcessor is deleteIfExists('n')"
    )
    assert changes(before, now, rules("total", starts_empty=True, forgotten=frozenset({"n"}))) == [
        "state 'total' of operator 'totals' is new: it starts empty",
        "state 'n' of operator 'totals' is left behind",
    ]
    both = keyed("value n: int32", "value total: int32")
    assert "holds state 'n'" in refusal(both, now, rules("total", renamed_from="n")), "two never become one"


def test_lists_of_an_operator_are_judged_as_states_are() -> None:  # EV11
    before, now = lists("list a: int32", "union b: int32"), lists("list a: int64", "union c: int32")
    said = OperatorRules(lists=(("c", StateRules(renamed_from="b")),))
    assert changes(before, now, said) == [
        "operator 'totals': in state 'a', int32 becomes int64",
        "operator 'totals': state 'b' becomes 'c'",
    ]
    assert "holds state 'b'" in refusal(before, lists("list a: int64"))
    assert "a list of int32" in refusal(before, lists("union a: int32", "union b: int32"))
    of_keys = f"{keyed('value n: int64')}; {before}"
    assert changes(of_keys, f"{keyed('value n: int64')}; {now}", said)
    assert "has no such state" in refusal(before, of_keys), "state of keys, which it did not have"
    assert changes(before, of_keys, rules("n", starts_empty=True))


def test_a_reduction_is_judged_as_a_record() -> None:  # EV1, EV9
    before = "reduce(keys k; columns k: int64, n: int32, old: large_string)"
    now = "reduce(keys k; columns k: int64, n: int64, new: large_string)"
    assert refusal(before, now).startswith(
        "state 'accumulators' of operator 'totals' is struct<k: int64, n: int32, old: large_string> in checkpoint 7, "
        "but is declared as struct<k: int64, n: int64, new: large_string> now: 'new' was added and has no default"
    )
    assert len(changes(before, now, rules("accumulators", defaulted=frozenset({"new"})))) == 3
    assert len(changes(before, now, rules("accumulators", renamed=(("old", "new"),)))) == 2
    beside = lists("list a: int32")
    assert (
        len(
            changes(
                f"{before}; {beside}",
                f"{now}; {lists('list a: int64')}",
                rules("accumulators", renamed=(("old", "new"),)),
            )
        )
        == 3
    )
    assert "holds state 'a'" in refusal(f"{before}; {beside}", before)
    assert "reduce(keys k, n" in refusal(before, now.replace("keys k;", "keys k, n;"))


def test_windows_that_keep_records_may_keep_wider_ones_and_fewer_columns() -> None:  # EV9
    before = "window-buffer(tumbling 20 ms on ts; keys k: int64; k: int64; ts: timestamp[us]; n: int32; m: int32)"
    now = "window-buffer(tumbling 20 ms on ts; keys k: int64; k: int64; ts: timestamp[us]; n: int64)"
    assert len(changes(before, now)) == 2
    assert "'m' was added and has no default" in refusal(now, before.replace("n: int32", "n: int64"))
    for other in (now.replace("20 ms", "40 ms"), now.replace("k: int64", "k: int32"), now.replace("on ts", "on at")):
        assert "this pipeline declares" in refusal(before, other)


def test_partial_results_of_windows_never_change() -> None:  # EV9
    merged = "window-merge(tumbling 20 ms on ts; keys k: int64; add int64 n)"
    for other in (merged.replace("int64 n", "float64 n"), merged.replace(" n)", " n; min int64 n)")):
        assert refusal(merged, other).startswith("the state of operator 'totals' in checkpoint 7 is [window-merge(")


@pytest.mark.parametrize("before", ["stream a", "reduce(keys k; columns )", "keyed state(keys k: ; )", "list", "x; y"])
def test_what_cannot_be_read_is_never_converted(before: str) -> None:  # EV1
    assert "this pipeline declares" in refusal(before, keyed("value n: int64"))
    assert "this pipeline declares" in refusal(keyed("value n: int64"), before)


def test_timers_alone_are_never_lost() -> None:  # TM6
    assert "this pipeline declares" in refusal(keyed("timers"), "")
    empty = rules("n", starts_empty=True)
    assert changes(keyed("timers"), keyed("value n: int64"), empty)
    other = keyed("value n: int64", keys="user: int32")
    assert "this pipeline declares" in refusal(keyed("timers"), other, empty), "timers of other keys"


def test_an_operator_without_state_may_be_given_one_that_starts_empty() -> None:  # EV7
    now = {"totals": keyed("value n: int64")}
    assert incompatibility(manifest(5, totals=""), now, 128) is not None
    said = {"totals": rules("n", starts_empty=True)}
    assert incompatibility(manifest(5, totals=""), now, 128, rules=said) is None
    assert incompatibility(manifest(5, totals=keyed("value n: int32")), now, 128) is None
