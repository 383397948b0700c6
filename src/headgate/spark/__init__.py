"""Package spark."""
