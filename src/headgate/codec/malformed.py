"""What decoding raises for bytes that are not ours, also under a right checksum.

Counterparts: all codecs. Each of them refuses such bytes in its own way, and lets nothing else out.
"""

from __future__ import annotations

import msgspec

MALFORMED = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""Other fields; no UTF-8, or what a value of the model refuses; numbers too large; what is nested too deeply."""
