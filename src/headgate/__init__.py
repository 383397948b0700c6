"""Headgate: exactly-once stream processing for Python, on Apache Spark."""
