"""Runs the product on one thread with one seed: the runtime's own classes on simulated machines with faults.

``machine`` replaces the operating system. ``product`` has pipelines, simulated users, faults and checkers.
``scenarios`` and ``streams`` have runs with features that ordinary runs do not have.
Counterpart: ``headgate.spark``, where the same runtime has processes. Source: docs/spec/simulator.md.
"""
