"""Every verb, with the catalogue on a server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.catalogue import test_sql as verbs
from tests.store.catalogue.test_sql import *  # noqa: F403

from headgate.store.catalogue.base import Catalogue
from headgate.store.store import Store


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[Catalogue]:
    with Store.open(tmp_path) as store:
        verbs.fill(store._core.catalogue)
        yield store._core.catalogue
