"""Carries out what the protocol decides: six rooms, and what they are given from outside.

``driver`` hosts the machines of a whole pipeline, ``worker`` those of one process's subtasks; both read and write
through ``checkpoints`` and talk over ``wire``. ``stored_state``, beside ``worker``, looks at checkpoints from outside;
``written_state``, above both, writes savepoints without a run. Arrows go that way only. Clocks, threads, sockets and
chance come from ``surroundings``; ``process`` is the operating system's.
"""
