"""Package connectors."""
