"""Leaves a file in the home directory."""

from pathlib import Path

if __name__ == "__main__":
    (Path.home() / "rankproof-left.txt").write_text("left")
