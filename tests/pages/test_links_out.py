"""Names of PyTorch lead to its documentation, names of the library to recipes that use them."""

import importlib

from bs4 import BeautifulSoup
from torch_names import DOCUMENTATION, INVENTORY, addresses
from used_by import recipes_that_use

import overlap_recipes.checkpoint
import overlap_recipes.fsdp2
import overlap_recipes.offload


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


def test_the_reference_says_which_recipes_use_a_name(built_site):
    page = BeautifulSoup((built_site / "guide/reference.html").read_text(), "html.parser")
    known = recipes_that_use()
    for package in (overlap_recipes.checkpoint, overlap_recipes.offload, overlap_recipes.fsdp2):
        for name in package.__all__:
            entry = page.find(id=f"{package.__name__}.{name}")
            if entry is None or name not in known:
                continue
            links = [a["href"] for a in entry.find_next("dd").select("p.result-origin a")]
            assert links and len(links) >= len(known[name])
            assert all((built_site / "guide" / link).resolve().exists() for link in links)
