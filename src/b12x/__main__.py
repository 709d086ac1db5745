"""``python -m b12x``: the same as the ``b12x`` command."""

import sys

from b12x.cli import main

if __name__ == "__main__":
    sys.exit(main())
