"""The command ``headgate``."""
