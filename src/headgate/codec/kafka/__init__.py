"""Kafka's formats: requests and answers of its protocol, and its record batches as Arrow columns. Never does I/O."""
