"""Machines without I/O, grouped by what they are about; each has its vocabulary of events and effects beside it.

Events go in, effects come out; there is no clock, no thread, no randomness. ``machine`` is what all of them share.
"""
