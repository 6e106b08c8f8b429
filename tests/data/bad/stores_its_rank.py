"""Stores what a launcher has stored already; what it raises is its own fault."""

import os

if __name__ == "__main__":
    os.environ["RANK"] = os.environ.get("RANK", "0")
    raise ValueError("the loss is not finite")
