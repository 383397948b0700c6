"""Sinks that users write: two small base classes, and their common parts."""
