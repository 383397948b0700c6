"""Transactions, with the catalogue on a server."""

from tests.store.writing.test_store_transactions import *  # noqa: F403
