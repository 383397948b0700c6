"""Carries out the decisions of the protocol.

``driver`` hosts the machines of a whole pipeline, and ``worker`` those of one process's subtasks. Both read and write
through ``checkpoints`` and communicate over ``wire``. ``state_reader``, beside ``worker``, reads checkpoints from
outside; ``savepoint_writer``, above both, writes savepoints without a run. Imports go only in that direction. Clocks,
threads, sockets and random numbers come from ``surroundings``.

Where to look: a restart is ``driver.restart``, a takeover ``driver.takeover``, the commit of sinks
``driver.connectors``, a reset ``driver.reset``; barrier alignment is ``protocol.checkpoints``, carried out by
``worker.subtask_runner``.
"""
