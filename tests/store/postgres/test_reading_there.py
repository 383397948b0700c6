"""Readers and streams, with the catalogue on a server."""

from tests.store.test_reader import *  # noqa: F403
from tests.store.test_store_streams import *  # noqa: F403
