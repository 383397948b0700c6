"""Random histories, readers, streams, scaling by hand, writers: with the catalogue on a server."""

from tests.store.faults.test_store_machines import TestStoreMachine  # noqa: F401
from tests.store.reading.test_reader import *  # noqa: F403
from tests.store.test_scaling import *  # noqa: F403
from tests.store.test_store_streams import *  # noqa: F403
from tests.store.writing.test_writer import *  # noqa: F403
from tests.store.writing.test_writer_acknowledgements import *  # noqa: F403
