"""One process of the pipeline: subtask i of every vertex, their chains, their loops, and what they measure."""
