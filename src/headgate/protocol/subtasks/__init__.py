"""The part of one subtask in the protocols: the machine that composes the others, and its vocabulary."""
