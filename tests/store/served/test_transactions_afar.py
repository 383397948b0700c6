"""Transactions, of a served store."""

from tests.store.writing.test_store_transactions import *  # noqa: F403
