"""Leaves a file in the cache of the user."""

from pathlib import Path

if __name__ == "__main__":
    cache = Path.home() / ".cache" / "rankproof-test"
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "downloaded").write_text("weights")
