"""Runs pipelines of the public API in the simulated machine room, injects faults, and judges the outcome."""
