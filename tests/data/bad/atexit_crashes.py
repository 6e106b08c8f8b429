"""A callback of atexit crashes."""

import atexit
import os

if __name__ == "__main__":
    atexit.register(os.abort)
