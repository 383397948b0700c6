"""A worker, one process of the pipeline: subtask i of every vertex, with their chains, loops and measurements."""
