"""The driver, one process per pipeline: hosts its machines, claims generations, commits sinks, launches workers."""
