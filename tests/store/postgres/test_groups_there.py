"""Reader groups, with the catalogue on a server."""

from tests.store.test_reader_groups import *  # noqa: F403
