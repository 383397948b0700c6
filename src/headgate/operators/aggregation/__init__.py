"""Aggregates: which there are, running ones, and those of the records before each record (OVER)."""
