"""Faults in the middle of a save, and an observer outside the job that knows what must survive."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes_source" / "checkpoint"))
