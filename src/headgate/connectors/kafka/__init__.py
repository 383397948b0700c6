"""Kafka: the client that its source and its sink use."""
