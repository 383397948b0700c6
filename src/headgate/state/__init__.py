"""Keyed state: descriptors, keys and their hash, and the backends, each in a room of its own."""
