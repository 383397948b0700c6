"""Loops: the log of a loop head, the probes that count circulating records, and rounds."""
