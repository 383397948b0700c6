"""Runs PySpark's own stateful processors on Headgate's state (rules SX of docs/spec/processors.md)."""
