"""A callback of atexit leaves with another status."""

import atexit
import os

if __name__ == "__main__":
    atexit.register(os._exit, 3)
