"""Reader groups, with the catalogue on a server."""

from tests.store.catalogue.test_groups import (  # noqa: F401
    holding,
    test_nothing_is_held_of_closed_segments_whose_events_are_gone,
    test_what_somebody_let_go_of_is_held_again_when_the_group_moves,
)
from tests.store.reading.test_reader_groups import *  # noqa: F403
