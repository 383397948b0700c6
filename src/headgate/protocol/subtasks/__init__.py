"""One subtask's part in everything: the machine that composes the others, and its vocabulary."""
