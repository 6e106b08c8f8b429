"""Faults in the middle of a save, and an observer outside the job that knows what must survive."""

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "recipes_source" / "checkpoint"), str(REPO), str(REPO / "tests")]
