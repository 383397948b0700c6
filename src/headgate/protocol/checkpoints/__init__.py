"""Checkpoints and savepoints: alignment, coordinator, two-phase commit, retention, and where a generation begins."""
