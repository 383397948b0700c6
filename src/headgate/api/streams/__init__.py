"""The verbs of streams."""
