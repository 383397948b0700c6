"""Transactions that several processes write, with the catalogue on a server."""

from tests.store.test_shared_transactions import *  # noqa: F403
