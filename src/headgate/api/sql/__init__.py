"""Queries in SQL as verbs of streams."""
