"""Transactions, of a served store."""

from tests.store.test_store_transactions import *  # noqa: F403
