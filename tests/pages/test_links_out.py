"""Names of PyTorch lead to its documentation, names of the library to recipes that use them."""

import importlib

from torch_names import DOCUMENTATION, INVENTORY, addresses


def test_each_name_of_the_inventory_is_one_of_torch():
    missing = []
    for address in addresses().values():
        assert address.startswith(DOCUMENTATION)
        path = address.removeprefix(DOCUMENTATION)
        documented = path.partition("#")[2] or path.removeprefix("generated/").removesuffix(".html")
        if documented.startswith("torch.") and not is_there(documented):
            missing.append(documented)
    assert missing == []
    assert INVENTORY.stat().st_size < 60_000


def is_there(name: str) -> bool:
    """Whether torch has what the documentation describes, at this name or a module of it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            found = getattr(found, part, None)
        return found is not None
    return False
