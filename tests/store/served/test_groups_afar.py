"""Reader groups, of a served store."""

from tests.store.reading.test_reader_groups import *  # noqa: F403
