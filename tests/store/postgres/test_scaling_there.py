"""Scaling, with the catalogue on a server."""

from tests.store.test_autoscaling import *  # noqa: F403
