"""Real processes, killed, with the catalogue on a server."""

from tests.store.faults.test_store_crash import *  # noqa: F403
