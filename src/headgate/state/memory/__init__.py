"""Keyed state in memory, by row for Python functions and by column for vectorised ones."""
