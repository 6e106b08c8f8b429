"""``rankproof`` by the name that it has in this checkout.

``python -m harness ...`` is ``rankproof ...`` without installing it, and ``harness.x`` is the very
module ``rankproof.x``: importing this package puts its source, which lies here, on the path.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("RANKPROOF_COMMAND", "python -m harness")


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``harness.x`` as the very module ``rankproof.x``."""

    def find_spec(self, name, path, target=None):
        own = name.startswith("harness.") and name != "harness.__main__"
        return importlib.machinery.ModuleSpec(name, self) if own else None

    def create_module(self, spec):
        module = importlib.import_module(spec.name.replace("harness.", "rankproof.", 1))
        self.real = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self.real


sys.meta_path.insert(0, _Alias())
