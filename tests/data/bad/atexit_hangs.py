"""A callback of atexit hangs."""

import atexit
import threading

if __name__ == "__main__":
    atexit.register(threading.Event().wait)
