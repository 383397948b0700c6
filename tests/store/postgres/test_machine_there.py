"""The store against a plain model, with the catalogue on a server."""

from tests.store.test_store_machine import TestStoreMachine  # noqa: F401
