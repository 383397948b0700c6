"""Other columns, with the catalogue on a server."""

from tests.store.test_schema_updates import *  # noqa: F403
