"""Whether a driver was replaced (R40, R56 of docs/spec/recovery.md): what cannot be read is never taken for nothing."""

from __future__ import annotations

import pytest
from tests.protocol.checkpoints.test_recovery import TORN, claim, log, manifest
from tests.protocol.making import gen

from headgate.model.manifest import LogEntry
from headgate.protocol.checkpoints.recovery import Damage, lost_entry, newest_of, replaced_by

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
