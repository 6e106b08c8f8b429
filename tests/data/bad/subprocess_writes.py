"""A subprocess leaves a file in /var/tmp."""

import subprocess

if __name__ == "__main__":
    subprocess.run(["touch", "/var/tmp/rankproof-left"], check=True)
