"""Copies of streams and topics between stores."""
