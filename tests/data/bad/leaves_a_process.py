"""Ends while a process that it started goes on."""

import subprocess
import sys

if __name__ == "__main__":
    wait_forever = "import threading; threading.Event().wait()"
    subprocess.Popen([sys.executable, "-c", wait_forever], start_new_session=True)
