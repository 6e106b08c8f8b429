"""Print how large the house is: rooms, files, the chain of modules of checkpoints, names.

    python tools/house.py [FOLDER]    # another checkout, to compare with

A package inside, such as ``state``, counts as one floor of that chain, and its own chain is printed
apart. What a function imports when it is called does not count.
"""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

ROOMS = {
    "overlap_recipes": "overlap_recipes/**/*.py",
    "checkpoint": "overlap_recipes/checkpoint/**/*.py",
    "offload": "overlap_recipes/offload/**/*.py",
    "fsdp2": "overlap_recipes/fsdp2/**/*.py",
    "recipes": "recipes_source/**/*.py",
    "harness": "harness/**/*.py",
    "_ext": "_ext/*.py",
    "benchmarks": "benchmarks/*.py",
    "tests": "tests/**/*.py",
    "tools": "tools/*.py",
}


def lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def imports_of(file: Path, root: Path) -> set[Path]:
    """The files below ``root`` that ``file`` imports by relative imports, when it is imported."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        base = file.parent
        for _ in range(node.level - 1):
            base = base.parent
        if node.module:
            base = base.joinpath(*node.module.split("."))
        modules = [base / f"{alias.name}.py" for alias in node.names]
        if not all(module.is_file() for module in modules):  # a name is one of the package itself
            modules += [base.with_suffix(".py"), base / "__init__.py"]
        for module in modules:
            if module.is_file() and root in module.parents:
                found.add(module)
    return found


def floor_of(file: Path, root: Path) -> Path:
    """The module ``file``; or the package below ``root`` that it is a room of."""
    inside = file.relative_to(root)
    return file if len(inside.parts) == 1 else root / inside.parts[0]


def below(folder: Path) -> dict[Path, set[Path]]:
    """What each floor of ``folder`` imports of the others: its modules, and whole packages."""
    found: dict[Path, set[Path]] = {}
    for file in folder.rglob("*.py"):
        floor = floor_of(file, folder)
        others = {floor_of(other, folder) for other in imports_of(file, folder)}
        found[floor] = found.get(floor, set()) | others - {floor}
    return found


def longest_chain(
    first: Path, floors: dict[Path, set[Path]], above: tuple[Path, ...] = ()
) -> tuple[Path, ...]:
    """The longest row of floors, each of which imports the next, from ``first`` on."""
    longest = (first,)
    for other in sorted(floors[first] - {*above}):
        chain = (first, *longest_chain(other, floors, (*above, first)))
        longest = max(longest, chain, key=len)
    return longest


def show_chain(folder: Path, first: Path) -> None:
    chain = longest_chain(first, below(folder))
    names = " > ".join(floor.stem for floor in chain)
    print(f"{len(chain) - 1} below {first.stem} in the longest chain of {folder.name}: {names}")


def definitions(folder: Path) -> Counter[str]:
    """In how many modules a name without an underscore is defined."""
    found: Counter[str] = Counter()
    for file in folder.rglob("*.py"):
        names = set()
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        found.update(name for name in names if not name.startswith("_"))
    return found


def documented(folder: Path) -> int:
    """Names that reference pages show."""
    text = "".join(file.read_text(encoding="utf-8") for file in folder.glob("guide/reference*.rst"))
    shown = re.findall(r"^\.\. auto(?:class|function|exception|data)::", text, re.MULTILINE)
    return len(shown)


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    for room, pattern in ROOMS.items():
        files = sorted(root.glob(pattern))
        if files:
            largest = max(files, key=lines)
            shown = f"largest {lines(largest)} {largest.relative_to(root)}"
            print(f"{sum(map(lines, files)):6} lines, {len(files):3} files  {room:16} {shown}")
    checkpoint = root / "overlap_recipes" / "checkpoint"
    show_chain(checkpoint, checkpoint / "manager.py")
    for door in sorted(checkpoint.glob("*/__init__.py")):
        show_chain(door.parent, door)
    counted = definitions(root / "overlap_recipes")
    twice = sorted(name for name, modules in counted.items() if modules > 1)
    print(f"{len(counted)} open names, {len(twice)} of them in several modules: {', '.join(twice)}")
    print(f"{documented(root)} names on reference pages")


if __name__ == "__main__":
    main()
