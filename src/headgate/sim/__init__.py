"""The product on one thread with one seed: the runtime's own classes in a machine room that fails, and a verdict.

Rooms: ``machine`` stands in for the operating system, ``product`` has pipelines, their user, faults and checkers,
``kinds`` and ``streams`` have runs with what ordinary ones do not have.
Counterpart: ``headgate.spark``, where the same runtime has processes. Source: docs/spec/simulator.md.
"""
