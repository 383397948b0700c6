"""Scaling by hand, with the catalogue on a server."""

from tests.store.test_scaling import *  # noqa: F403
