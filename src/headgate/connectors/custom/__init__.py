"""Sinks that users write: two small classes to derive from, and what they share."""
