"""Exits with status 1."""

import sys

if __name__ == "__main__":
    sys.exit(1)
