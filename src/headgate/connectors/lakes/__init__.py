"""Tables of Delta Lake and Iceberg: sinks and sources."""
