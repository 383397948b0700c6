"""Every verb, with the catalogue on a server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import few
from tests.store.catalogue import test_sql as verbs
from tests.store.catalogue.test_sql import *  # noqa: F403

from headgate.store.catalogue.base import Catalogue
from headgate.store.store import Store


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[Catalogue]:
    with Store.open(tmp_path) as store:
        verbs.fill(store._core.catalogue)
        yield store._core.catalogue


@pytest.mark.parametrize("verb", few(verbs.WRITES, 6))
def test_a_verb_that_changes_is_one_transaction_and_can_be_repeated(
    catalogue: Catalogue, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # all of them are carried out once where they fail at their end
    verbs.check_repeated(catalogue, verb, monkeypatch)
