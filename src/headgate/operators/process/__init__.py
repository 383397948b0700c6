"""Process functions: the user's code with keyed state, by row and by batch."""
