"""The digest of a seed in processes whose sets and dicts of texts have other orders."""

from __future__ import annotations

import os
import subprocess
import sys


def digests_of(module: str, seed: int) -> set[str]:
    """Run a seed of ``headgate.sim.<module>`` under two hash seeds; return its digests."""
    program = f"from headgate.sim.{module} import run_seed; print(run_seed({seed}).digest)"
    found = set()
    for hash_seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=300
        )
        found.add(done.stdout)
    return found
