"""Transactions that several processes write, of a served store."""

from tests.store.writing.test_shared_transactions import *  # noqa: F403
