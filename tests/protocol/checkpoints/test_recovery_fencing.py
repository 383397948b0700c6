"""Whether a driver was replaced, or reset (R40, R56 of docs/spec/recovery.md, docs/spec/starting-over.md)."""

from __future__ import annotations

import pytest
from tests.protocol.checkpoints.test_recovery import TORN, claim, log, manifest
from tests.protocol.making import gen

from headgate.model.manifest import Claim, LogEntry
from headgate.protocol.checkpoints import recovery
from headgate.protocol.checkpoints.recovery import Damage, is_reset, lost_entry, newest_of, replaced_by, reset_owner
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.memory import MemoryStorage

OWN = {1: claim(1), 2: manifest(1), 3: manifest(2)}
"""What a driver of generation 1, "host:1", has written: whatever is at 4 or behind it may be another one's."""


@pytest.mark.parametrize(
    ("later", "hint", "expected"),
    [
        ({}, 0, None),
        ({}, 3, None),
        ({4: claim(2)}, 0, None),  # of the same owner
        ({4: manifest(3, 2)}, 0, gen(2)),
        ({4: TORN}, 0, TORN),
        ({4: claim(2), 5: TORN}, 0, TORN),
        ({4: TORN, 5: manifest(3, 2)}, 0, gen(2)),
        ({4: manifest(3, 2), 5: TORN}, 0, gen(2)),
        ({}, 4, lost_entry(4)),
        ({5: claim(2)}, 0, lost_entry(4)),
        ({3: TORN}, 0, None),  # its own, which recovery judges
        ({2: TORN, 4: TORN}, 0, TORN),
    ],
)
def test_a_driver_knows_whether_it_was_replaced_or_that_it_cannot_know(  # R56
    later: dict[int, LogEntry | Damage], hint: int, expected: object
) -> None:
    assert replaced_by(log({**OWN, **later}, hint=hint), gen(1), "host:1", 4) == expected


def test_another_owners_claim_tells() -> None:  # R40
    assert replaced_by(log({**OWN, 4: claim(2)}), gen(1), "another:1", 4) == 2


@pytest.mark.parametrize(
    ("later", "above", "expected"),
    [
        ({}, 1, None),
        ({4: claim(1)}, 1, None),
        ({4: claim(2), 5: TORN}, 1, gen(2)),
        ({4: claim(1), 5: TORN}, 1, TORN),
        ({4: TORN}, 0, TORN),
    ],
)
def test_what_follows_tells_of_a_newer_generation_or_that_nobody_can_tell(  # R56
    later: dict[int, LogEntry | Damage], above: int, expected: object
) -> None:
    assert newest_of(log(later).entries, gen(above)) == expected


ORDER = Claim(gen(2), "anybody", 0, follows=0, life=2, order="5eed")


def test_a_claim_that_names_an_order_makes_it_count() -> None:  # SO2, SO9
    found = log({1: Claim(gen(1), "a driver", 0), 2: ORDER})
    assert recovery.decided_reset(found) == "5eed"
    assert is_reset(found)


def test_a_reset_names_its_order_in_the_log() -> None:  # SO2, SO9
    written = CheckpointLog(MemoryStorage(), "p")
    written.claim("a driver", 0)
    written.start_over("5eed", 0, written.observe(), gen(7))
    assert recovery.decided_reset(written.observe()) == "5eed"
    written.claim("a driver", 0)
    assert recovery.decided_reset(written.observe()) is None


def test_an_order_is_over_once_somebody_claimed() -> None:  # SO2
    later = Claim(gen(3), "a driver", 0, follows=2, life=2)
    assert recovery.decided_reset(log({2: ORDER, 3: later})) is None


@pytest.mark.parametrize("owner", ["a driver", reset_owner("5eed")])
def test_the_name_of_whoever_claims_orders_nothing(owner: str) -> None:  # SO9
    given_up = Claim(gen(2), owner, 0, follows=0, life=2)
    assert recovery.decided_reset(log({1: Claim(gen(1), "a driver", 0), 2: given_up})) is None


def test_a_claim_that_gives_nothing_up_orders_nothing() -> None:  # SO9
    assert recovery.decided_reset(log({1: Claim(gen(1), "a driver", 0, order="5eed")})) is None
