"""Inside a rank: run a recipe as ``__main__`` and leave a record of what it did.

The recipe knows nothing of this. The record says that the recipe's last line was reached, or what
stopped it, and what it left behind: threads, processes, a process group, files elsewhere.
``python -m rankproof.rank SPEC`` is what torchrun starts; :mod:`rankproof.warm` calls :func:`run`.
"""

import ast
import concurrent.futures
import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from rankproof.leader import command_line, descendants, die_with_parent, write_exit

HARNESS = os.path.dirname(__file__)
LEFTOVER_GRACE_S = 5.0  # a finished executor's thread needs a moment to end
HELPERS = ("multiprocessing.resource_tracker", "torch_shm_manager")  # they end with their parent
STARTERS = (threading.__file__, os.path.dirname(concurrent.futures.__file__), HARNESS)
EXIT_OK, EXIT_FAILED = 0, 1


class WriteWatch:
    """Notes, by an audit hook, what this process writes outside the run's directory.

    Directories that it renames or removes are passed on at once, before it happens: ``on_renamed``
    and ``on_removed`` take absolute paths.
    """

    WRITING_EVENTS = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}

    def __init__(self, allowed: list[str]) -> None:
        self.allowed = tuple(os.path.realpath(p) for p in allowed) + ("/dev/", "/proc/")
        self.elsewhere: set[str] = set()
        self.on_renamed: Callable[[str, str], None] = lambda old, new: None
        self.on_removed: Callable[[str], None] = lambda path: None
        self.inside_hook = threading.local()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple) -> None:
        if event == "open":
            path, _, flags = args
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        elif event in self.WRITING_EVENTS:
            path, writes = args[self.WRITING_EVENTS[event]], True
            if event == "os.rename" and os.path.isdir(args[0]):
                self.on_renamed(*(os.path.abspath(os.fsdecode(end)) for end in args[:2]))
        elif event in ("shutil.rmtree", "os.rmdir"):
            if args[1] in (None, -1):  # else relative to an open directory that rmtree empties
                self.on_removed(os.path.abspath(os.fsdecode(args[0])))
            return
        else:
            return
        if not writes or not isinstance(path, (str, bytes, os.PathLike)):
            return
        if getattr(self.inside_hook, "busy", False):
            return
        self.inside_hook.busy = True
        try:
            resolved = os.path.realpath(os.fsdecode(path))
            if not resolved.startswith(self.allowed):
                self.elsewhere.add(resolved)
        finally:
            self.inside_hook.busy = False


class ThreadWatch:
    """Remembers which line started each thread, and what no thread's caller will see raised."""

    def __init__(self, folders: list[str], compiler: str) -> None:
        self.folders = tuple(folders)
        self.compiler = compiler
        self.started: dict[threading.Thread, tuple[str, str]] = {}  # file that did, recipe's line
        self.errors: list[str] = []
        start, excepthook = threading.Thread.start, threading.excepthook

        def watched(thread: threading.Thread) -> None:
            self.started[thread] = self._starter()
            start(thread)

        def noted(args: threading.ExceptHookArgs) -> None:
            name = args.thread.name if args.thread else "a thread"
            if args.exc_value is not None and args.exc_type is not SystemExit:
                self.errors.append(f"{summary(args.exc_value)} (in thread {name}, seen by nobody)")
            excepthook(args)

        threading.Thread.start, threading.excepthook = watched, noted

    def _starter(self) -> tuple[str, str]:
        starter, frame = "", sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            starter = starter or ("" if file.startswith(STARTERS) else file)
            if file.startswith(self.folders):
                return starter, f", started at {os.path.basename(file)}:{frame.f_lineno}"
            frame = frame.f_back
        return starter, ""

    def left(self) -> list[str]:
        """The threads that keep the interpreter from ending, after a moment to end.

        Those of torch's compiler, which end with it, are not counted.
        """
        until = time.monotonic() + LEFTOVER_GRACE_S
        left = []
        for thread in threading.enumerate():
            starter, line = self.started.get(thread, ("", ""))
            if thread is threading.current_thread() or thread.daemon:
                continue
            if starter.startswith(self.compiler):
                continue
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                left.append(f"{thread.name}{line}")
        return sorted(left)


class DeprecationWatch:
    """Notes deprecation warnings that point at the recipe's folder."""

    def __init__(self, folders: list[str]) -> None:
        self.folders = tuple(folders)
        self.seen: list[str] = []
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("default", category)
        self.show = warnings.showwarning
        warnings.showwarning = self._show

    def _show(self, message, category, filename, lineno, file=None, line=None) -> None:
        deprecated = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
        if issubclass(category, deprecated) and os.path.realpath(filename).startswith(self.folders):
            self.seen.append(f"{os.path.basename(filename)}:{lineno}: {message}")
        self.show(message, category, filename, lineno, file, line)


def keep_temporary_directories() -> None:
    """Leave ``TemporaryDirectory`` contents for the judge; the run's directory goes as a whole."""
    import tempfile

    def detach(self) -> None:
        self._finalizer.detach()

    tempfile.TemporaryDirectory.cleanup = detach
    tempfile.tempdir = None


def _last_statement_lines(path: str) -> range:
    """Lines of the recipe's last statement, inside ``if __name__ == "__main__"`` if it ends so."""
    last = ast.parse(Path(path).read_text(encoding="utf-8")).body[-1]
    while isinstance(last, (ast.If, ast.With, ast.Try)):
        last = (getattr(last, "finalbody", None) or last.body)[-1]
    return range(last.lineno, last.end_lineno + 1)


def _exits_at_its_end(error: SystemExit, recipe: str) -> bool:
    """Whether ``sys.exit`` was called by the recipe's last statement itself, with status 0."""
    if error.code not in (None, 0):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    own = [i for i, frame in enumerate(frames) if frame.filename == recipe]
    return (
        bool(own)
        and own == [len(frames) - 1]
        and frames[-1].lineno in _last_statement_lines(recipe)
    )


def summary(error: BaseException) -> str:
    """The error in a line; of a CheckpointException, the first rank's cause.

    If it was raised while another one passed through a ``finally``, that one comes first.
    """
    if error.__context__ and not (error.__cause__ or error.__suppress_context__):
        first = summary(error.__context__)
        return f"{first} (then {type(error).__name__} while cleaning up)"
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        rank, failure = next(iter(failures.items()))
        cause = failure[0] if isinstance(failure, tuple) else failure
        return f"{type(error).__name__}, rank {rank}: {summary(cause)}"
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


def print_from_recipe(error: BaseException, recipe: str) -> None:
    """Print the traceback from the recipe's own first frame on, without the harness's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != recipe:
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames or error.__traceback__))


def _left_processes() -> list[str]:
    until = time.monotonic() + LEFTOVER_GRACE_S
    while True:
        commands = [f"{pid}: {command_line(pid)}" for pid in descendants(os.getpid())]
        left = [c for c in commands if not any(helper in c for helper in HELPERS)]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.05)


def _redirect(output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)


def run(spec: dict) -> int:
    """Run ``spec["file"]`` in this process, write the record, return the exit status.

    The environment holds RANK, WORLD_SIZE and the rendezvous, as torchrun sets them.
    """
    rank = int(os.environ["RANK"])
    ranks_dir = Path(spec["run_dir"]) / "ranks"
    _redirect(ranks_dir / f"rank{rank}.out")
    stacks = open(ranks_dir / f"rank{rank}.stacks", "w")  # noqa: SIM115 (open until the end)
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    (ranks_dir / f"rank{rank}.pid").write_text(str(os.getpid()))  # SIGUSR1 is safe from now on

    import torch
    from rankproof import gates, ledger

    recipe = spec["file"]
    sys.argv = [recipe, *spec["args"]]
    first = [*spec["import_from"], *spec["pythonpath"]]
    sys.path[:] = [*first, *(p for p in sys.path if p not in ("", spec["harness"], *first))]
    os.environ["PYTHONPATH"] = os.pathsep.join(spec["pythonpath"])
    if not spec["pythonpath"]:
        del os.environ["PYTHONPATH"]
    keep_temporary_directories()
    writes = WriteWatch([spec["run_dir"]])
    deprecations = DeprecationWatch(spec["import_from"])
    threads = ThreadWatch(spec["import_from"], os.path.join(torch.__path__[0], "_inductor"))
    book = ledger.Ledger(ranks_dir / f"rank{rank}.notes")
    writes.on_renamed = lambda old, new: book.note("renamed", path=old, to=new)
    writes.on_removed = lambda path: book.note("removed", path=path)
    book.install()
    if spec["gate"]:
        gates.install(spec["gate"], book)
    recorder = None
    if spec["order"] and not torch.accelerator.is_available():  # real streams are not recorded
        from rankproof import streams

        recorder = streams.install()

    record = {
        "recipe": spec["recipe"],
        "code_sha256": spec["code_sha256"],
        "rank": rank,
        "world_size": int(os.environ["WORLD_SIZE"]),
        "torch": torch.__version__,
        "finished": False,
        "error": None,
    }
    (ranks_dir / f"rank{rank}.began").touch()  # the deadline counts from here
    started = time.perf_counter()
    try:
        runpy.run_path(recipe, run_name="__main__")
        record["finished"] = True
    except SystemExit as error:
        record["finished"] = _exits_at_its_end(error, recipe)
        record["exit"] = repr(error.code)
        if not record["finished"]:
            print_from_recipe(error, recipe)
    except BaseException as error:
        record["error"] = summary(error)
        print_from_recipe(error, recipe)
    record["seconds"] = time.perf_counter() - started
    record["device"] = book.device()
    record["backend"] = book.backend
    if recorder is not None:
        record["conflicts"] = [str(conflict) for conflict in recorder.conflicts]
        streams.uninstall(recorder)
    if record["finished"]:
        book.end()
        record["left_process_group"] = torch.distributed.is_initialized()
        record["left_threads"] = threads.left()
        record["left_processes"] = _left_processes()
    record["thread_errors"] = threads.errors
    record["wrote_elsewhere"] = sorted(writes.elsewhere)
    record["deprecations"] = deprecations.seen
    book.close()
    temporary = ranks_dir / f"rank{rank}.tmp"
    temporary.write_text(json.dumps(record))
    temporary.rename(ranks_dir / f"rank{rank}.json")
    sys.stdout.flush()
    sys.stderr.flush()
    return EXIT_OK if record["finished"] else EXIT_FAILED


def main(spec_path: str) -> None:
    """Run the rank in a child, keep its wait status, end as it ended.

    The status is written here because torchrun tells nobody what became of each rank.
    """
    spec = json.loads(Path(spec_path).read_text())
    parent, me = os.getppid(), os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(me)
        os._exit(run(spec))
    die_with_parent(parent)
    status = os.waitpid(child, 0)[1]
    write_exit(Path(spec["run_dir"]) / "ranks", int(os.environ["RANK"]), status)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1])
