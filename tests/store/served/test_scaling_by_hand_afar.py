"""Scaling by hand, of a served store."""

from tests.store.test_scaling import *  # noqa: F403
