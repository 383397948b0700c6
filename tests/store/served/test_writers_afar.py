"""Writers and their acknowledgements, of a served store."""

from tests.store.test_writer import *  # noqa: F403
from tests.store.test_writer_acknowledgements import *  # noqa: F403
