"""What state in RocksDB cannot hold yet: said when the pipeline is defined. Needs no RocksDB."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.errors import UsageError
from headgate.state.descriptors import StateDescriptor


def refuse_expiring(operator: str, descriptors: Sequence[StateDescriptor]) -> None:
    """Make sure that no state has a TTL, which RocksDB does not keep (RB9).

    Raises:
        UsageError
    """
    for descriptor in descriptors:
        if descriptor.ttl is not None:
            raise UsageError(
                f"state '{descriptor.name}' of operator '{operator}' has a TTL, and headgate.RocksDB keeps none yet; "
                "give the pipeline state=headgate.Memory(), or the state no TTL"
            )
