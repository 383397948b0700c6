"""``python -m headgate.sim``: see ``headgate.sim.product.__main__``."""

import sys

from headgate.sim.product.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
