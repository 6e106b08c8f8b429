"""``python -m harness``: rankproof from the checkout."""

import sys

from rankproof.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
