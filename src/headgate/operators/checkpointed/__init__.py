"""How users' functions, readers and writers take part in checkpoints: as listeners, and with operator state."""
