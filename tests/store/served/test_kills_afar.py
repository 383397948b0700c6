"""Real processes, killed, of a served store."""

from tests.store.test_store_crash import *  # noqa: F403
