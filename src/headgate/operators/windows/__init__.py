"""Windows: which records belong to one, and when its result is emitted."""
