"""Savepoints that are written from outside, without a run: from rows that somebody has (docs/spec/writing-state.md)."""
