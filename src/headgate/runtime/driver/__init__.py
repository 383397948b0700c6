"""One process for the whole pipeline: hosts its machines, claims generations, commits sinks, launches workers."""
