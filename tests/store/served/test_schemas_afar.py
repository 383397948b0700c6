"""Other columns, of a served store."""

from tests.store.test_schema_updates import *  # noqa: F403
