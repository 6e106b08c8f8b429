# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/names.py
"""Names of parameters in a checkpoint: those of the model without what is put around it."""

from collections import OrderedDict

from torch import nn

# what ``torch.compile`` and ``checkpoint_wrapper`` add to names
WRAPPERS = "_orig_mod", "_checkpoint_wrapped_module"


class Names:
    """The names in a checkpoint of what ``model`` has."""

    def __init__(self, model: nn.Module) -> None:
        self._in_ddp = prefixes_of_ddp(model)

    def of(self, key: str) -> str:
        """``key`` without what DDP, ``torch.compile`` and ``checkpoint_wrapper`` add to it."""
        for outer in self._in_ddp:
            if key.startswith(f"{outer}module."):
                key = outer + key.removeprefix(f"{outer}module.")
        if not any(wrapper in key for wrapper in WRAPPERS):
            return key
        return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def prefixes_of_ddp(model: nn.Module) -> list[str]:
    """What names of parameters begin with where DDP adds ``module.``; the innermost first."""
    prefixes = []
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            prefixes.append(f"{name}." if name else "")
    return sorted(prefixes, key=len, reverse=True)


def like(model: dict, other: dict) -> OrderedDict:
    """``model`` with the versions of modules of ``other``, at which modules look in a load."""
    found = OrderedDict(model)
    found._metadata = getattr(other, "_metadata", None)
    return found
