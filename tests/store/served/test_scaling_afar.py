"""Scaling by policies, of a served store."""

from tests.store.test_autoscaling import *  # noqa: F403
