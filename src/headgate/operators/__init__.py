"""Operators on Arrow batches. They never see a barrier, a channel or a checkpoint id."""
