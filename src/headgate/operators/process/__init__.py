"""Process functions: users' code with keyed state, called per record or per batch."""
