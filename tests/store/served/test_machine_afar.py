"""The store against a plain model, served."""

from tests.store.test_store_machine import TestStoreMachine  # noqa: F401
