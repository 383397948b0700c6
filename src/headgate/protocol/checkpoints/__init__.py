"""Checkpoints: alignment, the coordinator, two-phase commit, and which one a new generation starts from."""
