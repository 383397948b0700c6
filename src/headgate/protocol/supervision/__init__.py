"""The life of a pipeline: generations, failures, restarts, supervisors and standbys, and which life may write to a
sink."""
