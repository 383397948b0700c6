"""Transactions, with the catalogue on a server."""

from tests.store.test_store_transactions import *  # noqa: F403
