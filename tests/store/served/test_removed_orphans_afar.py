"""Orphans that are removed while somebody writes, of a served store."""

from tests.store.test_removed_orphans import *  # noqa: F403
