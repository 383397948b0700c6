"""What users' functions, readers and writers may have to do with checkpoints: listen to them, keep operator state."""
