"""Writers and their acknowledgements, with the catalogue on a server."""

from tests.store.test_writer import *  # noqa: F403
from tests.store.test_writer_acknowledgements import *  # noqa: F403
