"""The protocol's machines on one thread with one seed: world, network, storage, faults, workload and checkers.

Counterpart: ``headgate.runtime``, which interprets the same machines for real. Source: docs/spec/simulator.md.
"""
