"""rankproof by the name that it has in this checkout.

``python -m harness ...`` is ``rankproof ...`` without installing it: importing this package puts
its source, which lies here, on the path. Who imports from it imports ``rankproof`` then.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("RANKPROOF_COMMAND", "python -m harness")
