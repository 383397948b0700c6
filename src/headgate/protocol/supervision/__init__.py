"""The life of a pipeline: generations, failures, restarts, keepers and standbys, and which life may write to a sink."""
