"""Reads the state in completed checkpoints and savepoints, without the pipeline (docs/spec/reading-state.md)."""
