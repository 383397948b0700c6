"""Pravega as source and sink."""
