"""Keyed state: descriptors, keys and their hash, and the backends, each in its own package."""
