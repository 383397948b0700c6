"""PySpark's own stateful processors: their handle and state on Headgate's (rules SX of docs/spec/processors.md)."""
