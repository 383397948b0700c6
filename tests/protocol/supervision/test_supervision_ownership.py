"""Whether a life may write to a target (docs/spec/lives.md)."""

from __future__ import annotations

import pytest
from tests.protocol.making import gen

from headgate.model.pipeline_identity import OtherSink, Owner, PipelineIdentity
from headgate.protocol.checkpoints.recovery import ObservedLog, next_claim
from headgate.protocol.supervision.ownership import (
    Objection,
    floor,
    may_delete_output,
    may_own,
    objection,
    owner_of_sink,
)


def life(name: str) -> PipelineIdentity:
    return PipelineIdentity(name, f"/{name}", "host", 0)


MINE = life("mine")


@pytest.mark.parametrize(
    ("owner", "following", "expected"),
    [
        (Owner(), 1, None),
        (Owner(life("mine"), gen(3)), 4, None),
        (Owner(life("other"), gen(3)), 9, Objection.OTHER_LIFE),  # LV2: whichever number is higher
        (Owner(life("other"), gen(9)), 3, Objection.OTHER_LIFE),
        (Owner(life("other")), 1, Objection.OTHER_LIFE),
        (Owner(None, gen(1)), 1, Objection.OTHER_LIFE),  # it was fenced without a life
        (Owner(None, gen(9), is_forgotten=True), 1, None),  # LV4
        (Owner(life("mine"), gen(4)), 4, Objection.OLDER_COPY),  # LV6
        (Owner(life("mine"), gen(5)), 4, Objection.OLDER_COPY),
    ],
)
def test_what_stands_against_a_start(owner: Owner, following: int, expected: Objection | None) -> None:
    assert objection(MINE, owner, gen(following)) is expected


def test_only_the_id_of_a_life_counts() -> None:  # a directory may be moved
    assert may_own(PipelineIdentity("mine", "/elsewhere", "h", 7), Owner(MINE))


def test_the_next_generation_exceeds_what_was_forgotten() -> None:  # LV4
    owners = [Owner(), Owner(None, gen(7), is_forgotten=True), Owner(MINE, gen(9))]
    assert floor(owners) == 7
    assert next_claim(ObservedLog((), 0), floor(owners)).generation == 8  # type: ignore[arg-type]
    assert next_claim(ObservedLog((), 0)).generation == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("owner", "host", "expected"),
    [
        (Owner(), "host", True),
        (Owner(life("mine")), "elsewhere", True),  # a directory may be moved, and a container begin anew
        (Owner(PipelineIdentity("former", "/home", "host", 0)), "host", True),
        (
            Owner(PipelineIdentity("former", "/home", "other machine", 0)),
            "host",
            False,
        ),  # its own directory
        (
            Owner(PipelineIdentity("former", "/home", "other machine", 0)),
            None,
            True,
        ),  # an object store
        (Owner(life("other")), None, False),
        (Owner(None, gen(1)), "host", False),
        (Owner(None, gen(1), is_forgotten=True), "host", False),  # it was promised that it keeps what it holds
    ],
)
def test_what_a_pipeline_that_starts_over_may_empty(owner: Owner, host: str | None, expected: bool) -> None:  # SO4
    assert may_delete_output(MINE, "/home", host, owner) is expected
    assert may_delete_output(None, "/home", host, owner) is (expected and owner.life != MINE)


def test_what_a_target_says_of_one_sink_lists_the_others() -> None:  # LV11
    mine, asked, third = Owner(life("a"), gen(1)), Owner(life("b"), gen(2)), Owner(life("c"), gen(3))
    answer = Owner(life("b"), gen(2), others=(OtherSink("mine", mine), OtherSink("third", third)))
    found = owner_of_sink("mine", "asked", answer)
    assert (found.life, found.generation) == (mine.life, mine.generation)
    assert found.others == (OtherSink("asked", asked), OtherSink("third", third))
    assert owner_of_sink("new", "asked", Owner()) == Owner(), "nobody is known"
