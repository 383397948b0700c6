"""Other kinds of simulated runs, a module each: its pipelines, its faults, and its checks beyond ``product``."""
