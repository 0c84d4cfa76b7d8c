"""Entry point of `python -m transom`, which is also how `transom up` starts its stages."""

from __future__ import annotations

import sys

from transom.cli import main

if __name__ == "__main__":
    sys.exit(main())
