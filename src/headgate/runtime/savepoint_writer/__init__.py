"""Writes savepoints without a run, from rows that the user provides (docs/spec/writing-state.md)."""
