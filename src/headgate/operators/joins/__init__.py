"""Joins: of two streams, with a table that changes, and with a broadcast side."""
