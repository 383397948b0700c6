"""Bytes of everything that is sent or kept, with versions and checksums. No I/O."""
