"""Package sim."""
