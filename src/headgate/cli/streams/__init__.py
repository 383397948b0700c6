"""The commands ``headgate streams``."""
