"""What the log says of an order to start over (docs/spec/starting-over.md)."""

from __future__ import annotations

import pytest
from tests.protocol.checkpoints.test_recovery import log
from tests.protocol.making import gen

from headgate.model.manifest import Claim
from headgate.protocol.checkpoints import recovery
from headgate.protocol.checkpoints.recovery import is_reset, reset_owner
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.memory import MemoryStorage

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
