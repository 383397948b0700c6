"""Real processes that are killed, random histories, readers, streams, scaling by hand, writers: of a served store."""

from tests.store.faults.test_store_crash import *  # noqa: F403
from tests.store.faults.test_store_machines import TestStoreMachine  # noqa: F401
from tests.store.reading.test_reader import *  # noqa: F403
from tests.store.test_scaling import *  # noqa: F403
from tests.store.test_store_streams import *  # noqa: F403
from tests.store.writing.test_writer import *  # noqa: F403
from tests.store.writing.test_writer_acknowledgements import *  # noqa: F403
