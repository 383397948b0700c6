"""Runs of other kinds: one module per kind, with its pipelines, its faults and what it judges beyond ``product``."""
