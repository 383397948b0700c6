"""The scenarios of ``check_sink``: a target, a fake pipeline in front of it, and the failures that it suffers."""
