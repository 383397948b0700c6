"""Truncation and retention, of a served store."""

from tests.store.test_store_truncation import *  # noqa: F403
