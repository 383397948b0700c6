"""The life of a pipeline: generations, failures, restarts, and which life may write to a sink."""
