"""What a snapshot says of a subtask beside its keys: a few facts in a section of their own, as JSON with a version.

Counterparts: ``state.timers`` and ``state.ttl``, which say what the facts mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headgate.errors import CorruptionError

_VERSION = 1


@dataclass(frozen=True, slots=True)
class MetaSection:
    """A section that belongs to no key.

    Attributes:
        name: of the section.
        what: its facts are about, in words.
    """

    name: str
    what: str

    def encode(self, **facts: int) -> bytes:
        """Return the facts as a section."""
        return json.dumps({"version": _VERSION, **facts}).encode()

    def found_in(self, sections: Mapping[str, memoryview], path: str) -> dict[str, Any] | None:
        """Return the facts that one part of a former snapshot holds; None: it has no such section.

        Raises:
            CorruptionError: it is of a version that is not known here.
        """
        if self.name not in sections:
            return None
        found: dict[str, Any] = json.loads(bytes(sections[self.name]))
        if found["version"] != _VERSION:
            raise CorruptionError(path, 0, f"{self.what} of version {_VERSION}", f"version {found['version']}")
        return found
