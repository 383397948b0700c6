"""Transactions that several processes write, with the catalogue on a server."""

from tests.store.writing.test_shared_transactions import *  # noqa: F403
