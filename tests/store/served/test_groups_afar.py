"""Reader groups, of a served store."""

from tests.store.test_reader_groups import *  # noqa: F403
