"""Loops: the head's log, the probes that count what is under way, and rounds."""
