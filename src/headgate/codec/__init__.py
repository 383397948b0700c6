"""Encodes and decodes everything that is sent or stored, with versions and checksums. No I/O."""
