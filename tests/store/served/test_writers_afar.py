"""Writers and their acknowledgements, of a served store."""

from tests.store.test_store_acknowledgements import *  # noqa: F403
from tests.store.test_store_linger import *  # noqa: F403
from tests.store.test_store_writer import *  # noqa: F403
