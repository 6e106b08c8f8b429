"""Inside a rank: run a recipe as ``__main__`` and leave a record of what it did.

The recipe knows nothing of this. The interpreter is let end by itself: it joins threads, ends
executors and worker processes and calls what the recipe has registered with ``atexit``. Only then,
in the very last ``atexit`` callback, is the record written. It says whether the recipe's last line
was reached or what stopped it, and what is left: a process group, files elsewhere.
``python -m rankproof.rank SPEC`` is what torchrun starts; :mod:`rankproof.server` calls
:func:`run`.
"""

import ast
import atexit
import concurrent.futures
import contextlib
import faulthandler
import importlib.util
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rankproof.errors import summary
from rankproof.imports import around, called_by_recipe, frames, recipe_line, torch_folder
from rankproof.leader import die_with_parent, write_exit

MULTIPROCESSING = os.path.dirname(multiprocessing.__file__)
STARTERS = (threading.__file__, os.path.dirname(concurrent.futures.__file__))
DEPRECATED = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
AT_LAST: list[Callable[[], None]] = []  # called after everything else that is to be called at exit


@atexit.register
def _at_last() -> None:  # registered before the recipe's own, so called after them
    for call in AT_LAST:
        call()


class FileWatch:
    """Sees, by an audit hook, what this process writes, and which directories it moves or removes.

    ``elsewhere`` is what was written outside the allowed directories. ``on_written``,
    ``on_renamed`` and ``on_removed`` are called with absolute paths before it happens.
    """

    WRITING_EVENTS = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}
    EVENTS = frozenset(("open", "os.rmdir", "shutil.rmtree", *WRITING_EVENTS))

    def __init__(self, allowed: list[str]) -> None:
        real = [f"{os.path.realpath(path)}/" for path in allowed]
        self.allowed = tuple(real) + ("/dev/", "/proc/", "/memfd:")
        self.elsewhere: set[str] = set()
        self.on_written: Callable[[str], None] = _ignore
        self.on_renamed: Callable[[str, str], None] = _ignore
        self.on_removed: Callable[[str], None] = _ignore
        self.inside_hook = threading.local()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple) -> None:
        if event not in self.EVENTS or getattr(self.inside_hook, "busy", False):
            return
        self.inside_hook.busy = True
        try:
            self._see(event, args)
        finally:
            self.inside_hook.busy = False

    def _see(self, event: str, args: tuple) -> None:
        if event == "os.rename" and os.path.isdir(args[0]):
            self.on_renamed(_absolute(args[0]), _absolute(args[1]))
        if event in ("shutil.rmtree", "os.rmdir") and args[1] in (None, -1):
            # else relative to an open directory that rmtree empties
            self.on_removed(_absolute(args[0]))
        path = self._written_by(event, args)
        if not isinstance(path, (str, bytes, os.PathLike)):  # a descriptor, or nothing
            return
        self.on_written(_absolute(path))
        real = os.path.realpath(os.fsdecode(path))
        if event == "os.mkdir" and any(place.startswith(f"{real}/") for place in self.allowed):
            return  # it leads to a directory that is allowed
        if not f"{real}/".startswith(self.allowed):
            self.elsewhere.add(real)

    def _written_by(self, event: str, args: tuple) -> object:
        """What an event writes; None if it writes nothing."""
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return path
        elif event in self.WRITING_EVENTS:
            return args[self.WRITING_EVENTS[event]]
        return None


def _ignore(*paths: str) -> None:
    pass


def _absolute(path: str | bytes | os.PathLike) -> str:
    return os.path.abspath(os.fsdecode(path))


class ThreadWatch:
    """Remembers which line started each thread, and what is raised and no caller will see."""

    def __init__(self) -> None:
        self.started: dict[threading.Thread, str] = {}  # the recipe's line
        self.compilers: set[threading.Thread] = set()  # torch's compiler's own
        self.errors: list[str] = []
        around(threading.Thread, "start", self._starts)
        around(threading, "excepthook", self._raises)
        around(sys, "unraisablehook", self._raises_at_exit)

    def _starts(self, thread: threading.Thread) -> None:
        self.started[thread] = recipe_line()
        if next(frames(STARTERS)).f_code.co_filename.startswith(torch_folder() + "_inductor"):
            self.compilers.add(thread)

    def _raises(self, args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread else "a thread"
        if args.exc_value is not None and args.exc_type is not SystemExit:
            self.errors.append(f"{summary(args.exc_value)} (in thread {name}, seen by nobody)")

    def _raises_at_exit(self, unraisable: Any) -> None:
        """The interpreter prints it, and exits 0."""
        if "atexit" in (unraisable.err_msg or ""):
            self.errors.append(f"{summary(unraisable.exc_value)} (in a callback of atexit)")

    def alive(self) -> list[str]:
        """The threads that the interpreter will wait for when it ends, but torch's compiler's."""
        left = {t for t in threading.enumerate() if not t.daemon} - self.compilers
        left.discard(threading.current_thread())
        starts = {t: f", started at {line}" for t, line in self.started.items() if line}
        return sorted(thread.name + starts.get(thread, "") for thread in left)


class ChildWatch:
    """Knows how the processes ended that the recipe has started by ``multiprocessing.Process``."""

    def __init__(self) -> None:
        self.started: dict[BaseProcess, str] = {}  # the recipe's line
        self.looked_at: set[BaseProcess] = set()  # ended by the recipe, or asked how they ended
        self.exit_code = BaseProcess.exitcode.fget
        around(BaseProcess, "start", self._starts)
        for name in ("terminate", "kill"):
            around(BaseProcess, name, self.looked_at.add)
        BaseProcess.exitcode = property(self._look)  # also sees who asks

    def _starts(self, process: BaseProcess) -> None:
        if called_by_recipe((MULTIPROCESSING,)):
            self.started[process] = recipe_line()

    def _look(self, process: BaseProcess) -> int | None:
        if called_by_recipe((MULTIPROCESSING,)):
            self.looked_at.add(process)
        return self.exit_code(process)

    def died(self) -> list[str]:
        """Those that ended badly, and the recipe never asked. Daemons are ended at the end."""
        found = []
        for process, line in self.started.items():
            with contextlib.suppress(ValueError):  # it was closed
                code = self.exit_code(process)
                ended_as_a_daemon = process.daemon and code == -signal.SIGTERM
                if code and process not in self.looked_at and not ended_as_a_daemon:
                    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    found.append(f"{process.name} ended with {how}, started at {line}")
        return found


class WorkWatch:
    """Knows whether a rank had left its process group when it called ``sys.exit`` or ``os._exit``.

    ``joined`` says whether it was ever in one; ``leave_now`` is called before an ``os._exit(0)``
    of a rank that had left it.
    """

    def __init__(self, joined: Callable[[], bool], leave_now: Callable[[], None]) -> None:
        self.was_behind_it = False
        self.joined = joined
        self.leave_now = leave_now
        self.pid = os.getpid()
        around(sys, "exit", self._exits)
        around(os, "_exit", self._ends_at_once)

    def is_behind_it(self, error: SystemExit, recipe: str) -> bool:
        """The same for ``raise SystemExit``, where no ``finally`` may have left the group since."""
        if not self.joined() or _group_is_left():
            return False
        tree = ast.parse(Path(recipe).read_text(encoding="utf-8"))
        tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.finalbody]
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename != recipe:
                continue
            if any(_holds(node, frame.lineno) for node in tries):
                return False
        return True

    def _exits(self, *_: object) -> None:
        self.was_behind_it = self.joined() and not _group_is_left()

    def _ends_at_once(self, status: int) -> None:
        """A process that the recipe has forked is no rank."""
        if os.getpid() != self.pid or status != 0 or not called_by_recipe((MULTIPROCESSING,)):
            return
        if self.joined() and not _group_is_left():
            self.leave_now()


def watch_deprecations(folders: list[str]) -> list[str]:
    """A list that fills with the deprecation warnings that point at the recipe's folders."""
    seen: list[str] = []
    for category in DEPRECATED:
        warnings.simplefilter("default", category)

    def noted(message, category, filename, lineno, *_) -> None:
        if issubclass(category, DEPRECATED) and filename.startswith(tuple(folders)):
            seen.append(f"{os.path.basename(filename)}:{lineno}: {message}")

    around(warnings, "showwarning", noted)
    return seen


def keep_temporary_directories(kept: Path) -> None:
    """Move a ``TemporaryDirectory`` aside where it is removed: its path is gone, as it must be,
    and the judge still finds what was in it."""
    import tempfile

    remove, count = tempfile.TemporaryDirectory._rmtree, itertools.count()

    def move(cls, name, *args, **kwargs) -> None:
        try:
            os.rename(name, kept / f"rank{os.environ.get('RANK', 0)}-{os.getpid()}-{next(count)}")
        except OSError:  # on another file system
            remove(name, *args, **kwargs)

    tempfile.TemporaryDirectory._rmtree = classmethod(move)
    tempfile.tempdir = None


def _nothing_follows(body: list[ast.stmt], line: int) -> bool:
    """Whether ``line`` is in the last statement of ``body``, and only a ``finally`` comes after."""
    last = body[-1]
    if not _holds(last, line):
        return False
    if isinstance(last, ast.For | ast.While):  # its next turn would follow
        return False
    if isinstance(last, ast.Try | ast.TryStar) and last.orelse:
        if line <= last.body[-1].end_lineno:  # its ``else`` would follow
            return False
    for block in _blocks_of(last):
        is_in_block = block[0].lineno <= line <= block[-1].end_lineno
        if is_in_block and not _nothing_follows(block, line):
            return False
    return True


def _holds(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= node.end_lineno


def _blocks_of(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of statements in a statement, in its handlers and in its cases."""
    parts = [statement]
    parts += getattr(statement, "handlers", [])
    parts += getattr(statement, "cases", [])
    blocks = []
    for part in parts:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(part, name, [])
            if block:
                blocks.append(block)
    return blocks


def _exits_at_its_end(error: SystemExit, recipe: str) -> bool:
    """Whether ``sys.exit`` with status 0 left nothing of the recipe out.

    That may happen anywhere, in ``main()`` or in a library that the recipe's last line called, as
    long as nothing but a ``finally`` follows in any of the recipe's functions it passed through.
    """
    if error.code not in (None, 0, False):
        return False
    tree = ast.parse(Path(recipe).read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename != recipe:
            continue
        innermost = tree
        if frame.name != "<module>":
            holding = [function for function in functions if _holds(function, frame.lineno)]
            innermost = max(holding, key=lambda function: function.lineno, default=tree)
        if not _nothing_follows(innermost.body, frame.lineno):
            return False
    return True


def not_the_edited_file(edited: dict[str, str] | None) -> str:
    """What is wrong where a module was edited and another file, or none, was imported."""
    if edited is None:
        return ""
    module = sys.modules.get(edited["name"])
    if module is None:
        return f"the edited {edited['name']} was never imported"
    file = getattr(module, "__file__", None)
    return "" if file == edited["file"] else f"{file} was imported, not the edited file"


def print_from_recipe(error: BaseException, recipe: str) -> None:
    """Print the traceback from the recipe's own first frame on, without the harness's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != recipe:
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames or error.__traceback__))


def _redirect(output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)


def _callers_paths(spec: dict) -> None:
    """Import from where the script would, not from where the harness lies."""
    first = [*spec["import_from"], *spec["pythonpath"]]
    dropped = ("", spec["harness"], spec["cwd"], *first)
    sys.path[:] = [*first, *(p for p in sys.path if p not in dropped)]
    os.environ["PYTHONPATH"] = os.pathsep.join(spec["pythonpath"])
    if not spec["pythonpath"]:
        del os.environ["PYTHONPATH"]


def run(spec: dict) -> None:
    """Run ``spec["file"]`` in this process and exit; the record is written at the very end.

    The environment holds RANK, WORLD_SIZE and the rendezvous, as torchrun sets them.
    """
    rank = int(os.environ.get("RANK", 0))
    ranks_dir = Path(spec["run_dir"]) / "ranks"
    _redirect(ranks_dir / f"rank{rank}.out")
    stacks = open(ranks_dir / f"rank{rank}.stacks", "w")  # noqa: SIM115 (open until the end)
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    (ranks_dir / f"rank{rank}.pid").write_text(str(os.getpid()))  # SIGUSR1 is safe from now on

    import torch

    from rankproof import ledger

    recipe = spec["file"]
    own_pid = os.getpid()
    until_the_end = contextlib.ExitStack()
    sys.argv = [recipe, *spec["args"]]
    _callers_paths(spec)
    keep_temporary_directories(Path(spec["run_dir"]) / "kept")
    files = FileWatch([spec["run_dir"], *spec["through"]])
    deprecations = watch_deprecations(spec["own_folders"])
    threads = ThreadWatch()
    children = ChildWatch()
    book = ledger.Ledger(ranks_dir / f"rank{rank}.notes")
    files.on_written = book.written_to
    files.on_renamed = lambda old, new: book.note("renamed", path=old, to=new)
    files.on_removed = lambda path: book.note("removed", path=path)
    book.install()
    if spec["gate"]:
        from rankproof import gates

        gates.install(spec["gate"], book)
    recorder = None
    if spec["order"] and not torch.accelerator.is_available():  # real streams are not recorded
        from rankproof.streams import recording

        recorder = until_the_end.enter_context(recording())

    record = {
        "torch": torch.__version__,
        "finished": False,
        "error": None,
        "thread_errors": threads.errors,
        "deprecations": deprecations,
    }

    def keep(suffix: str) -> None:
        """Write the record as it is now: ``ended`` with the recipe, ``json`` with the process."""
        temporary = ranks_dir / f"rank{rank}.tmp"
        temporary.write_text(json.dumps(record))
        temporary.rename(ranks_dir / f"rank{rank}.{suffix}")

    def write_record() -> None:
        record["left_process_group"] = record["finished"] and _group_is_left()
        record["dead_children"] = children.died()
        record["wrote_elsewhere"] = sorted(files.elsewhere)
        book.close(finished=record["finished"])
        keep("json")
        sys.stdout.flush()
        sys.stderr.flush()

    def is_forked() -> bool:
        """Whether this is a process that the recipe has forked, which is no rank."""
        return os.getpid() != own_pid

    def at_last() -> None:
        if is_forked():
            return
        write_record()
        if spec["launcher"] == "warm":  # what this process was forked from need not be taken down
            os._exit(not record["finished"])

    def leave_now() -> None:
        record["device"] = book.device()
        record["backend"] = book.backend
        record["finished"] = True
        record["left_early"] = "os._exit(0)"
        record["misfit"] = not_the_edited_file(spec["edited"])
        record["threads_at_the_end"] = []
        AT_LAST.remove(at_last)
        book.last_line()
        keep("ended")
        write_record()

    work = WorkWatch(lambda: book.backend is not None, leave_now)
    AT_LAST.append(at_last)
    (ranks_dir / f"rank{rank}.began").touch()  # the deadline counts from here
    started = time.perf_counter()
    try:
        _run_as_main(recipe, spec["module"])
        record["finished"] = True
    except SystemExit as error:
        if is_forked():
            raise
        record["exit"] = repr(error.code)
        record["finished"] = _exits_at_its_end(error, recipe)
        behind_it = work.was_behind_it or work.is_behind_it(error, recipe)
        if not record["finished"] and error.code in (None, 0) and behind_it:
            record["left_early"] = f"sys.exit({error.code!r})"
            record["finished"] = True
        if not record["finished"]:
            print_from_recipe(error, recipe)
    except BaseException as error:
        record["error"] = summary(error)
        print_from_recipe(error, recipe)
    if is_forked():
        sys.exit(not record["finished"])
    record["seconds"] = time.perf_counter() - started
    record["device"] = book.device()
    record["backend"] = book.backend
    if recorder is not None:
        record |= recorder.report()
    until_the_end.close()
    book.hash_clones()
    if record["finished"]:
        book.last_line()
    record["misfit"] = not_the_edited_file(spec["edited"])
    record["threads_at_the_end"] = threads.alive()
    keep("ended")
    sys.exit(not record["finished"])


def _run_as_main(recipe: str, name: str) -> None:
    """Run the file as the interpreter would: its module is ``__main__`` until the very end.

    A module of a package, which has a ``name``, runs as ``python -m`` runs it.
    """
    module = types.ModuleType("__main__")
    module.__file__ = recipe
    if name:
        module.__package__ = name.rpartition(".")[0]
        module.__spec__ = importlib.util.find_spec(name)  # imports its packages
    module.__builtins__ = __builtins__
    sys.modules["__main__"] = module
    exec(compile(Path(recipe).read_bytes(), recipe, "exec"), module.__dict__)


def _group_is_left() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def main(spec_path: str) -> None:
    """Run the rank in a child, keep its wait status, end as it ended.

    The status is written here because torchrun tells nobody what became of each rank.
    """
    spec = json.loads(Path(spec_path).read_text())
    parent, me = os.getppid(), os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(me)
        run(spec)
    die_with_parent(parent)
    status = os.waitpid(child, 0)[1]
    write_exit(Path(spec["run_dir"]) / "ranks", int(os.environ.get("RANK", 0)), status)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1])
