"""The text of a state's identity: as it always was, and what can be told from it."""

from __future__ import annotations

import pytest

from headgate.model.state_schema import Form, StateIdentity, declared

KEYS = [("user", "large_string"), ("part", "int64")]
COUNT = declared("value", "count", "int64")
LISTS = StateIdentity.of_lists([declared("list", "seen", "int64"), declared("union", "all", "int64")])
COUNTED = StateIdentity.of_keyed(KEYS, [COUNT], has_timers=True)
TIMED = StateIdentity.of_keyed(KEYS, [], has_timers=True)
REDUCED = StateIdentity.of_reduce(["user", "part"], "user: large_string, part: int64, n: int64")
MERGED = StateIdentity.of_windows(Form.WINDOW_RESULTS, "tumbling 20 ms", "ts", KEYS, ["sum int64 n"])
KEPT = StateIdentity.of_windows(Form.WINDOW_RECORDS, "tumbling 20 ms", "ts", KEYS, ["n: int64"])


@pytest.mark.parametrize(
    ("identity", "form", "text"),
    [
        (COUNTED, Form.KEYED, "keyed state(keys user: large_string, part: int64; value count: int64)"),
        (TIMED, Form.KEYED, "keyed state(keys user: large_string, part: int64; timers)"),
        (StateIdentity.of_keyed(KEYS, [], has_timers=False), Form.OTHER, ""),
        (LISTS, Form.OTHER, "operator state(list seen: int64; union all: int64)"),
        (REDUCED, Form.REDUCE, "reduce(keys user, part; columns user: large_string, part: int64, n: int64)"),
        (
            MERGED,
            Form.WINDOW_RESULTS,
            "window-merge(tumbling 20 ms on ts; keys user: large_string, part: int64; sum int64 n)",
        ),
        (
            KEPT,
            Form.WINDOW_RECORDS,
            "window-buffer(tumbling 20 ms on ts; keys user: large_string, part: int64; n: int64)",
        ),
    ],
)
def test_a_text_is_the_same_in_every_version(identity: StateIdentity, form: Form, text: str) -> None:
    assert (identity.text, identity.form, bool(identity)) == (text, form, text != "")


def test_what_a_text_says_is_read_from_it() -> None:
    assert COUNTED.beside(LISTS).key_names(["large_string", "int64"]) == ("user", "part")
    assert COUNTED.key_names(["int64", "int64"]) == ()
    assert REDUCED.keys_among({"part": "int64", "user": "large_string"}) == ("user", "part")
    assert (MERGED.window_ms, KEPT.window_ms) == (20, 0)
    assert not COUNTED.beside(LISTS).declares("list", "seen"), "a list of the operator has no key"


def test_timers_are_all_that_may_be_added() -> None:  # TM6
    nothing = StateIdentity("")
    assert TIMED.adds_timers_to(nothing)
    assert TIMED.beside(LISTS).adds_timers_to(LISTS)
    assert not TIMED.beside(LISTS).adds_timers_to(nothing)
    assert not COUNTED.adds_timers_to(nothing)
