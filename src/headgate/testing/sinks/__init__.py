"""What ``check_sink`` puts a sink through: a target, a fake pipeline in front of it, and its misfortunes."""
