"""What a file sink expects of its storage, and what it passes over there."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.connectors.files.file_committer import FileCommitter
from headgate.connectors.files.publish_log import SinkIdentity
from headgate.errors import UsageError
from headgate.model.ids import Generation
from headgate.storage.memory import MemoryStorage

IDENTITY = SinkIdentity("p", "out")


class Careless(MemoryStorage):
    """An object store that ignores the condition of a conditional put."""

    def put_if_absent(self, path: str, parts: Any) -> None:
        self.put(path, parts)


def test_a_sink_in_a_storage_that_ignores_the_condition_of_a_put_is_refused() -> None:
    storage = Careless("careless")
    with pytest.raises(UsageError, match="replaces an object that was to be written only if absent"):
        FileCommitter(storage, IDENTITY, Generation(1)).recover([])
    assert storage.list("") == []


def test_files_that_are_no_claims_are_passed_over() -> None:
    storage = MemoryStorage("stray")
    for name in ("README", ".DS_Store", "99", "0000000099.bak"):
        storage.put(f"{IDENTITY.claims}/{name}", [b"?"])
    FileCommitter(storage, IDENTITY, Generation(1)).recover([])
    FileCommitter(storage, IDENTITY, Generation(2)).recover([])
    assert IDENTITY.claim(Generation(2)) in storage.list(IDENTITY.claims)
    assert IDENTITY.claim(Generation(1)) not in storage.list(IDENTITY.claims)
