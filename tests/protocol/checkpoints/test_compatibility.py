"""What goes on as what in an edited program, and whether its state fits: what is converted, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.checkpoints.test_recovery import manifest

from headgate.errors import NameOperator
from headgate.model.lineage import Lineage, Location, NodeKind, Relocation
from headgate.model.schema_evolution import OperatorRules, StateRules
from headgate.protocol.checkpoints.compatibility import Matching, judged
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


def test_what_an_operator_of_headgate_keeps_is_refused_without_advice_that_only_a_function_could_take() -> None:  # EV9
    own = OperatorRules(is_built_in=True)
    before = keyed("value totals: struct<rows: int64, add_n: int32>")
    assert changes(before, keyed("value totals: struct<rows: int64, add_n: int64>"), own)
    for now in ("value totals: struct<rows: int64, max_n: int32>", "value top 3 by n: struct<rows: int64>"):
        assert refusal(before, keyed(now), own) == (
            f"the state of operator 'totals' in checkpoint 7 is [{before}], but this pipeline declares [{keyed(now)}]; "
            "restore the old definition, or rename the operator or the pipeline"
        )
    table = lists("broadcast map table: int64 -> struct<a: int32>")
    assert "[operator state(" in refusal(table, lists("broadcast map table: int64 -> struct<b: int32>"), own)


def test_a_join_goes_on_with_a_narrower_bound_alone() -> None:  # EV18
    own = OperatorRules(is_built_in=True)

    def joined(lower: str, upper: str) -> str:
        return keyed("list left: struct<t: int64>", "list right: struct<t: int64>", f"reach {lower} to {upper} ms")

    before = joined("-5", "10")
    assert changes(before, joined("-5", "9"), own) == [
        "operator 'totals' joins rows with right time - left time from -5 ms to 9 ms now, and no longer right time - "
        "left time from -5 ms to 10 ms"
    ]
    assert changes(joined("any", "0"), joined("-3", "0"), own)
    for lower, upper in (("-6", "10"), ("-5", "11"), ("any", "10"), ("0", "11"), ("-6", "0")):
        assert refusal(before, joined(lower, upper), own).startswith("operator 'totals' joined rows with right time ")
    assert refusal(before, joined("any", "0"), own) == (
        "operator 'totals' joined rows with right time - left time from -5 ms to 10 ms when checkpoint 7 was written, "
        "and joins rows with right time - left time to 0 ms now: partners that it had forgotten would be missing "
        "without a word; set the bound back, or, to begin without the rows of both sides, give the operator another "
        "name, and allow_unclaimed_state=['totals']"
    )
    without = keyed("list left: struct<t: int64>", "list right: struct<t: int64>")
    of_windows = without[:-1] + "; windows tumbling 10 ms)"
    for one, other in ((before, without), (without, before), (before, of_windows), (without, of_windows)):
        assert "this pipeline declares" in refusal(one, other, own)
    other_states = before.replace("list right", "list rights")
    assert "this pipeline declares" in refusal(before, other_states, own)


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


@pytest.mark.parametrize(
    "before", ["stream a", "window-buffer(tumbling 20 ms on ts; keys k: ; )", "keyed state(keys k: ; )", "list", "x; y"]
)
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


def place(name: str, real: str = "") -> Location:
    return Location(name, real or name)


def source(*names: str, derived: bool = True) -> Lineage:
    return Lineage(NodeKind.SOURCE, derived, tuple(place(name) for name in names))


def sink(name: str, *, derived: bool = False) -> Lineage:
    return Lineage(NodeKind.SINK, derived, (place(name),))


def operator(sources: str, digest: str = "") -> Lineage:
    return Lineage(NodeKind.OPERATOR, True, (), tuple(sources.split()), digest)


def why(before: dict[str, Lineage], now: dict[str, Lineage], **kept: str) -> str:
    found = Matching("checkpoint 7", before, now, kept).problem()
    return "" if found is None else found[0]


def test_what_is_the_same_goes_on() -> None:
    nodes = {"source": source("/a"), "source-2": source("/a/b"), "reduce": operator("source"), "out": sink("/o")}
    assert why(nodes, nodes, out="3 records") == ""


def test_a_node_that_is_what_another_was_is_told_by_that_name() -> None:  # EV14
    before = {"reduce": operator("a", "x"), "reduce-2": operator("a", "y"), "reduce-3": operator("a", "z")}
    now = {"reduce": operator("a", "x"), "reduce-2": operator("a", "z"), "reduce-3": operator("a", "y")}
    found = Matching("checkpoint 7", before, now, {}).problem()
    assert found is not None
    assert found[0].startswith("operator 'reduce-2' is what 'reduce-3' was when checkpoint 7 was written")
    assert found[1] == NameOperator("reduce-2")


def test_two_that_changed_at_once_are_not_guessed_and_one_is_an_edit() -> None:  # EV14
    before = {"reduce": operator("a", "f1"), "reduce-2": operator("a", "f2")}
    assert why(before, {"reduce": operator("a", "f1"), "reduce-2": operator("a", "f3")}) == ""
    both = {"reduce": operator("a", "f4"), "reduce-2": operator("a", "f3")}
    assert "cannot be told whose state it goes on with" in why(before, both)


def test_one_that_was_added_among_others_that_are_like_it_is_not_guessed() -> None:  # EV14
    before = {"reduce": operator("a", "f1")}
    now = {"reduce": operator("a", "f2"), "reduce-2": operator("a", "f3")}
    assert "operator 'reduce' has no name of its own" in why(before, now)
    assert why(before, {"reduce": operator("a", "f1"), "reduce-2": operator("a", "f3")}) == ""


def test_the_only_one_may_be_edited_as_long_as_it_gets_records_of_a_source_that_it_had() -> None:  # EV14
    before = {"reduce": operator("a b", "f1")}
    assert why(before, {"reduce": operator("b c", "g2")}) == ""
    assert "operator 'reduce' has no name of its own" in why(before, {"reduce": operator("c", "f1")})
    named = Lineage(NodeKind.OPERATOR)
    assert why(before, {"reduce": named}) == ""


def test_parts_of_a_window_are_of_one_kind_whatever_their_number() -> None:  # EV14
    before = {"window-combine": operator("a", "x"), "window-2-combine": operator("a", "y")}
    now = {"window-combine": operator("a", "y"), "window-2-combine": operator("a", "x")}
    assert "'window-2-combine' is what 'window-combine' was" in why(before, now)


def test_a_place_may_come_or_go_or_be_a_part_but_not_be_another_one() -> None:  # EV13
    before = {"in": source("/a", "/b", derived=False)}
    for names in (("/a",), ("/a", "/b", "/c"), ("/b", "/a"), ("/a/x/*.json", "/b"), ("/",), ("/a/../a", "/b")):
        assert why(before, {"in": source(*names, derived=False)}) == ""
    assert "reads /c now" in why(before, {"in": source("/a", "/c", derived=False)})
    assert "reads /ab now" in why({"in": source("/a", derived=False)}, {"in": source("/ab", derived=False)})


def test_a_sink_is_compared_while_something_is_kept_for_it() -> None:  # EV16
    before, now = {"out": sink("/a")}, {"out": sink("/a/b")}
    assert why(before, now) == ""
    assert "sink 'out' wrote to /a when checkpoint 7, which holds 3 records, was written" in why(
        before, now, out="3 records"
    )
    assert list(Matching("checkpoint 7", before, {"out": sink("/b")}, {}).changes()) == [
        "sink 'out' writes to /b from now on, and no longer /a"
    ]


def test_sinks_that_do_not_say_where_they_write_are_told_apart_by_sources_and_by_what_they_hold() -> None:  # EV14, EV16
    def own(sources: str, digest: str) -> Lineage:
        return replace(operator(sources, digest), kind=NodeKind.SINK)

    held = {"sink": "its state", "sink-2": "its state"}
    before = {"sink": own("a", "x"), "sink-2": own("a", "y")}
    assert why(before, before, **held) == ""
    assert "sink 'sink' is what 'sink-2' was" in why(before, {"sink": own("a", "y"), "sink-2": own("a", "x")}, **held)
    before = {"sink": own("a", "x"), "sink-2": own("b", "x")}
    assert "sink 'sink' is what 'sink-2' was" in why(before, {"sink": own("b", "x"), "sink-2": own("a", "x")}, **held)
    assert "sink 'sink-2' has no name of its own" in why(
        before, {"sink": own("a", "x"), "sink-2": own("c", "x")}, **held
    )


def test_a_sink_may_go_on_in_another_stream_of_its_store() -> None:  # EV13
    before = {"out": sink("/store#a")}
    assert why(before, {"out": sink("/store#b")}, out="output") == ""
    assert "wrote to stream a in /store" in why(before, {"out": sink("/other#a")}, out="output")
    moved = Matching("checkpoint 7", before, {"out": sink("/new#a")}, {"out": "output"}, (("/store", "/new"),))
    assert moved.problem() is None


def relocated(path: str, before: Location, now: Location, *moves: tuple[str, str]) -> str:
    return Relocation((before,), (now,), moves).of(path)


def test_a_path_is_found_under_the_name_of_today() -> None:  # EV15, EV17
    assert relocated("/a/x", place("/a"), place("/b"), ("/a", "/b")) == "/b/x"
    assert relocated("/a/x", place("/a"), place("/b"), ("/", "/data")) == "/a/x"
    assert relocated("/a/x", place("/a/*"), place("/b/c/*"), ("/a", "/b/c")) == "/b/c/x"
    assert relocated("/link/x", place("/link", "/real"), place("/real")) == "/real/x"
    assert relocated("/real/y/x", place("/real"), place("/link", "/real/y")) == "/link/x"
    assert relocated("/data/x", place("/data"), place("/data/old"), ("/data", "/data/old")) == "/data/old/x"
    assert relocated("/a/x", place("/a"), place("/a"), ("/a", "/a/a")) == "/a/x"


@dataclass(frozen=True)
class Node:
    """A node of a program as its user knows it: ``number`` says which one it is, whatever it is called."""

    number: int
    sources: str
    does: int
    name: str | None = None

    @property
    def lineage(self) -> Lineage:
        return replace(operator(self.sources, str(self.does)), is_derived=self.name is None)


def called(program: list[Node]) -> dict[str, Node]:
    """Return the nodes by the names that they get in the order of the program."""
    found: dict[str, Node] = {}
    taken = {node.name for node in program}
    for node in program:
        free = (
            name for n in range(1, 20) if (name := f"reduce-{n}" if n > 1 else "reduce") not in taken | found.keys()
        )
        found[node.name or next(free)] = node
    return found


PROGRAMS = st.lists(st.tuples(st.sampled_from(["a", "b", "a b"]), st.integers(0, 2)), min_size=1, max_size=4)


@given(st.data(), PROGRAMS)
def test_whatever_is_edited_no_unnamed_node_gets_the_state_of_another(
    data: st.DataObject, drawn: list[tuple[str, int]]
) -> None:  # EV14
    program = [Node(number, *node) for number, node in enumerate(drawn)]
    edited = data.draw(st.permutations(program))
    if data.draw(st.booleans()):
        edited = edited[data.draw(st.integers(0, len(edited))) :]
    else:
        new = [Node(100 + n, *node) for n, node in enumerate(data.draw(PROGRAMS))]
        edited = data.draw(st.permutations([*edited, *new]))
    for at in data.draw(st.sets(st.integers(0, max(len(edited) - 1, 0)))):
        if edited:
            edited[at] = replace(edited[at], does=data.draw(st.integers(3, 5)))
    before, now = called(program), called(edited)
    lineages = [{name: node.lineage for name, node in nodes.items()} for nodes in (before, now)]
    if Matching("checkpoint 7", *lineages, {}).problem() is not None:
        return
    for name in before.keys() & now.keys():
        one, two = before[name], now[name]
        was = program[two.number] if two.number < len(program) else two
        # What was alike in all that tells nodes apart had the same state.
        assert one.lineage == was.lineage or one.number == two.number, (name, before, now)


@given(PROGRAMS)
def test_the_same_program_goes_on_whatever_is_alike_in_it(drawn: list[tuple[str, int]]) -> None:  # EV14
    nodes = {name: node.lineage for name, node in called([Node(n, *node) for n, node in enumerate(drawn)]).items()}
    assert why(nodes, nodes) == ""


def test_a_source_whose_places_are_others_says_what_it_read() -> None:  # EV17
    found = Matching("checkpoint 3", {"a": source("x")}, {"a": source("x", "y"), "b": source("z")}, {}, ())
    assert found.relocation("a") == Relocation(source("x").locations, source("x", "y").locations, ())
    assert found.relocation("b") is None, "it is new"
    assert Matching("c", {"a": source("x")}, {"a": source("x")}, {}, ()).relocation("a") is None
