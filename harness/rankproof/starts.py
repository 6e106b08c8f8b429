"""How a script wants to be started, read from its source: its own ranks, its options.

Calls of torch's and Python's multiprocessing and of launchers count, by the names under which a
script has imported them: NumPy's ``SeedSequence.spawn`` starts nothing.
"""

import ast
from collections.abc import Mapping

MULTIPROCESSING = ("multiprocessing", "torch.multiprocessing")
STARTS_RANKS = ("spawn", "start_processes")
LAUNCHERS = (  # what starts ranks by itself, by its full name
    "torch.distributed.launcher.elastic_launch",
    "torch.distributed.launcher.launch_agent",
    "torch.distributed.launcher.api.elastic_launch",
    "torch.distributed.launcher.api.launch_agent",
    "torch.distributed.run.main",
    "torch.distributed.run.run",
    "accelerate.notebook_launcher",
    "accelerate.debug_launcher",
    "accelerate.launchers.notebook_launcher",
    "accelerate.launchers.debug_launcher",
)
JOINS_A_GROUP = "init_process_group"
RENDEZVOUS = ("MASTER_PORT", "MASTER_ADDR", "RANK", "WORLD_SIZE")
NAMES_A_RENDEZVOUS = ("init_method", "default")  # init_process_group's; that of an option for it
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
OPTION_MAKERS = ("add_argument", "option")  # argparse's; click's and typer's
NEEDS_NO_VALUE = ("store_true", "store_false", "count")
NOT_A_PATH = ("int", "float", "bool")


def own_ranks(source: str, beside: Mapping[str, str] = {}) -> tuple[str, str]:
    """Where a script starts its ranks itself, and where it sets their rendezvous; empty if not.

    A ``Process`` is a rank if the script sets a rendezvous, or if what it runs joins a group. What
    is stored only where it is missing sets none: a launcher's stands.

    Args:
        source: the script's text.
        beside: the text, by name, of each module of the script's project: a function of these that
            starts ranks, and that the script calls, starts the script's.
    """
    tree = ast.parse(source)
    names = _imported_names(tree)
    sets = _sets_rendezvous(tree)
    starting = set()
    for module, text in beside.items():
        starting |= {f"{module}.{name}" for name in _functions_that_start(ast.parse(text))}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = _full_name(node.func, names)
        if called in starting or _starts_a_rank(node, called, tree, sets):
            return f"{called.rpartition('.')[2]}, line {node.lineno}", sets
    return "", sets


def _starts_a_rank(call: ast.Call, called: str, tree: ast.Module, sets: str) -> bool:
    if called in LAUNCHERS:
        return True
    module, _, function = called.rpartition(".")
    if module not in MULTIPROCESSING:
        return False
    if function == "Process":
        return bool(sets) or _joins_a_group(_target(call), tree)
    return function in STARTS_RANKS


def _functions_that_start(tree: ast.Module) -> set[str]:
    """The functions of a module that start ranks, by others of it or by themselves."""
    names = _imported_names(tree)
    sets = _sets_rendezvous(tree)
    found: set[str] = set()
    callers: dict[str, set[str]] = {}  # by the name of what they call
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                called = _full_name(node.func, names)
                callers.setdefault(getattr(node.func, "id", ""), set()).add(function.name)
                if _starts_a_rank(node, called, tree, sets):
                    found.add(function.name)
    to_read = list(found)
    while to_read:
        new = callers.get(to_read.pop(), set()) - found
        found |= new
        to_read += new
    return found


def _target(process: ast.Call) -> str:
    """The name of the function that a ``Process`` runs; empty if it has none."""
    for keyword in process.keywords:
        if keyword.arg == "target":
            return getattr(keyword.value, "id", "")
    return ""


def _joins_a_group(function: str, tree: ast.Module) -> bool:
    """Whether a function of the script, or one that it calls there, joins a process group."""
    bodies = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            bodies[node.name] = node
    to_read = [function]
    read = set()
    while to_read:
        name = to_read.pop()
        if name == JOINS_A_GROUP:
            return True
        if name in bodies and name not in read:
            read.add(name)
            to_read += _called_in(bodies[name])
    return False


def _called_in(body: ast.FunctionDef) -> list[str]:
    """The last names of what is called: ``init_process_group`` of ``dist.init_process_group()``."""
    found = []
    for node in ast.walk(body):
        if isinstance(node, ast.Call):
            found.append(getattr(node.func, "attr", getattr(node.func, "id", "")))
    return found


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """What each name that the script imports stands for, contexts of multiprocessing among them."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            owner, _, last = _full_name(node.value.func, names).rpartition(".")
            target = node.targets[0]
            if last == "get_context" and owner in MULTIPROCESSING and isinstance(target, ast.Name):
                names[target.id] = owner
    return names


def _full_name(node: ast.AST, names: dict[str, str]) -> str:
    """The dotted name of what is called, from the module on; empty for what has none."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Call):  # multiprocessing.get_context("spawn").Process
        owner, _, last = _full_name(node.func, names).rpartition(".")
        return ".".join([owner, *reversed(parts)]) if last == "get_context" else ""
    if not isinstance(node, ast.Name) or node.id not in names:
        return ""
    return ".".join([names[node.id], *reversed(parts)])


def _sets_rendezvous(tree: ast.Module) -> str:
    """Where the script stores what a launcher stores, whether or not it is there already."""
    only_if_missing = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and _asks_the_environment(node.test):
            only_if_missing |= set(ast.walk(node))
    for node in ast.walk(tree):
        for keyword in getattr(node, "keywords", []):
            if keyword.arg in NAMES_A_RENDEZVOUS and _names_a_port(keyword.value):
                return f"{keyword.arg}, line {node.lineno}"
        if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Store):
            continue
        key = getattr(node.slice, "value", "")
        if key in RENDEZVOUS and node not in only_if_missing:
            return f"{key}, line {node.lineno}"
    return ""


def _names_a_port(value: ast.expr) -> bool:
    """Whether a text, or the parts that it is put together from, begins as ``tcp://...`` does."""
    for node in ast.walk(value):
        if isinstance(node, ast.Constant) and str(node.value).startswith("tcp:"):
            return True
    return False


def _asks_the_environment(test: ast.expr) -> bool:
    """Whether a condition names a variable of a launcher: ``"RANK" not in os.environ``."""
    for node in ast.walk(test):
        if isinstance(node, ast.Constant) and node.value in (*RENDEZVOUS, *OF_A_RANK):
            return True
    return False


def takes_dir(source: str) -> bool:
    """Whether a script has an option ``--dir`` that takes a path and leads nowhere else.

    A flag of that name, or a number, is the script's own affair.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        maker = getattr(node.func, "attr", getattr(node.func, "id", ""))
        named = [getattr(argument, "value", None) for argument in node.args]
        if maker.lower() in OPTION_MAKERS and "--dir" in named and _takes_a_path(node):
            return True
    return False


def _takes_a_path(option: ast.Call) -> bool:
    for keyword in option.keywords:
        said = getattr(keyword.value, "value", getattr(keyword.value, "id", None))
        if keyword.arg == "action" and said in NEEDS_NO_VALUE:
            return False
        if keyword.arg == "is_flag" and said:
            return False
        if keyword.arg == "type" and getattr(keyword.value, "id", "") in NOT_A_PATH:
            return False
        if keyword.arg in ("choices", "nargs"):
            return False
    return True
