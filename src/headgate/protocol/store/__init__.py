"""Transactions of the stream store."""
