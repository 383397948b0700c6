"""Package codec."""
