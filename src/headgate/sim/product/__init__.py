"""Runs of the product itself in the simulated machine room: pipelines of the public API, faults, a verdict."""
