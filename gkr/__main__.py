"""`python -m gkr` is the same program as `gkr`."""

from __future__ import annotations

import sys

from gkr.main import main

if __name__ == "__main__":
    sys.exit(main())
