"""Writers, transactions, readers and a group in many processes, under faults, on SQLite and files."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from tests.conftest import few
from tests.logs.bugs import PLANTED
from tests.logs.checks import Kind, anomalies
from tests.logs.faults import STRIKES, Strike, kills_a_reader, lived_through, scales

from headgate.store.store import Store

pytestmark = pytest.mark.crash


def test_no_client_sees_an_anomaly_whatever_happens_to_the_others(tmp_path: Path) -> None:
    chance = random.Random(20)
    with Store.open(tmp_path / "store") as store:
        found = lived_through(store, tmp_path / "logs", chance, chance.sample(STRIKES, len(STRIKES)))
        print(Counter(f"{x.process.partition('.')[0]} {x.outcome}" for x in found))
        assert [str(anomaly) for anomaly in anomalies(found)] == []
        assert store.reader_group("members").unread_bytes() == 0
        assert [problem for problem in store.fsck() if not problem.is_harmless] == []


FOUND: dict[str, tuple[set[Kind], tuple[str, ...], tuple[Strike, ...]]] = {
    "some_are_acknowledged_and_not_recorded": ({Kind.LOST_WRITE}, ("append1",), (scales,)),
    "lost_answers_are_not_looked_up": ({Kind.TWO_PLACES}, ("append1",), (scales,)),
    "transactions_become_visible_one_by_one": ({Kind.TORN_READ}, ("transact1", "observe1"), (scales, scales)),
    "a_reader_passes_over_some": ({Kind.SKIPPED, Kind.CYCLE}, ("append1", "observe1"), (scales,)),
    "members_say_that_they_commit": ({Kind.PROCESSED_TWICE}, ("append1", "member1"), (kills_a_reader, kills_a_reader)),
}
"""Which anomalies show it, with which clients and strikes."""


@pytest.mark.mutant
@pytest.mark.parametrize("bug", few(PLANTED, 2))
def test_a_bug_of_the_store_shows_in_the_history_of_its_clients(bug: str, tmp_path: Path) -> None:
    kinds, names, strikes = FOUND[bug]
    with Store.open(tmp_path / "store") as store:
        found = lived_through(store, tmp_path / "logs", random.Random(4), strikes, names=names, least=20, bug=bug)
        assert kinds & {anomaly.kind for anomaly in anomalies(found)}
