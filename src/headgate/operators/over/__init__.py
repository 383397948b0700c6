"""OVER aggregates: for each record an aggregate of the records of its key before it (docs/spec/over.md)."""
