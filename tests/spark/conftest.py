"""The same host process as for the crash tests."""

from crash.conftest import dice, host, launch, run, spec, storage_fault, told

__all__ = ["dice", "host", "launch", "run", "spec", "storage_fault", "told"]
