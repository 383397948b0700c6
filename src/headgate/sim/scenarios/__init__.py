"""Scenarios of the simulator: each runs pipelines of one kind under faults and judges what became of them."""
