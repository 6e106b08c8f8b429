"""Closes what its errors would be printed to, and fails."""

import sys

if __name__ == "__main__":
    sys.stdout.close()
    sys.stderr.close()
    raise ValueError("the loss is not finite")
