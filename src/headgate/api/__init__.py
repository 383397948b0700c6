"""Package api."""
