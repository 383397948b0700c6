"""Runs the product on one thread with one seed: the runtime's own classes in a simulated machine room with faults.

``machine`` replaces the operating system. ``product`` has pipelines, a simulated user, faults and checkers. ``kinds``
and ``streams`` have runs with features that ordinary runs do not have.
Counterpart: ``headgate.spark``, where the same runtime has processes. Source: docs/spec/simulator.md.
"""
