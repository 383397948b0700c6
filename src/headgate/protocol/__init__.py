"""State machines without I/O, grouped by topic, each with its vocabulary of events and effects beside it.

A machine takes events and returns effects. It uses no clock, no threads and no randomness. ``machine`` is their base.
"""
