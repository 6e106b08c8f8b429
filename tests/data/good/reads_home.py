"""The home directory is the caller's."""

import os
import sys

if __name__ == "__main__":
    assert os.path.expanduser("~") == sys.argv[1]
