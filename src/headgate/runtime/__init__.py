"""Carries out what the protocol decides.

``driver`` hosts the machines of a whole pipeline, and ``worker`` those of one process's subtasks. Both read and write
through ``checkpoints`` and communicate over ``wire``. ``stored_state``, beside ``worker``, reads checkpoints from
outside; ``written_state``, above both, writes savepoints without a run. Imports go only in that direction. Clocks,
threads, sockets and random numbers come from ``surroundings``; ``process`` provides those of the operating system.
"""
