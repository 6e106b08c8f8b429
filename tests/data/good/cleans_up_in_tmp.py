"""Writes to /tmp and removes what it has written."""

import os

if __name__ == "__main__":
    path = f"/tmp/rankproof-test-{os.getpid()}"
    with open(path, "w") as file:
        file.write("for a moment")
    os.remove(path)
