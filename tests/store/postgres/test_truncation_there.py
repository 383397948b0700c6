"""Truncation and retention, with the catalogue on a server."""

from tests.store.test_store_truncation import *  # noqa: F403
