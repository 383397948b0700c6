"""What goes on as what in an edited program, without running it (EV13 to EV17)."""

from __future__ import annotations

from headgate.model.lineage import Lineage, Location, NodeKind, Relocation
from headgate.protocol.checkpoints.matching import Matching
from headgate.remedies import NameOperator


def place(name: str, real: str = "") -> Location:
    return Location(name, real or name)


def source(*names: str, derived: bool = True) -> Lineage:
    return Lineage(NodeKind.SOURCE, derived, tuple(place(name) for name in names))


def sink(name: str, *, derived: bool = False) -> Lineage:
    return Lineage(NodeKind.SINK, derived, (place(name),))


def operator(sources: str, shape: str = "", code: str = "") -> Lineage:
    return Lineage(NodeKind.OPERATOR, True, (), tuple(sources.split()), shape, code)


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
    before = {"reduce": operator("a", "f", "1"), "reduce-2": operator("a", "f", "2")}
    assert why(before, {"reduce": operator("a", "f", "1"), "reduce-2": operator("a", "f", "3")}) == ""
    both = {"reduce": operator("a", "f", "4"), "reduce-2": operator("a", "f", "3")}
    assert "cannot be told whose state it goes on with" in why(before, both)


def test_one_that_was_added_among_others_that_are_like_it_is_not_guessed() -> None:  # EV14
    before = {"reduce": operator("a", "f", "1")}
    now = {"reduce": operator("a", "f", "2"), "reduce-2": operator("a", "f", "3")}
    assert "operator 'reduce' has no name of its own" in why(before, now)
    assert why(before, {"reduce": operator("a", "f", "1"), "reduce-2": operator("a", "f", "3")}) == ""


def test_the_only_one_may_be_edited_as_long_as_it_gets_records_of_a_source_that_it_had() -> None:  # EV14
    before = {"reduce": operator("a b", "f", "1")}
    assert why(before, {"reduce": operator("b c", "g", "2")}) == ""
    assert "operator 'reduce' has no name of its own" in why(before, {"reduce": operator("c", "f", "1")})
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


def test_streams_of_one_store_are_places_of_their_own() -> None:  # EV13
    before = {"out": sink("/store#a")}
    assert "wrote to stream a in /store" in why(before, {"out": sink("/store#b")}, out="output")
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
