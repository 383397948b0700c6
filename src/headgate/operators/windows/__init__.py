"""Event-time windows: the plan of an aggregation, and the operators that execute it."""
