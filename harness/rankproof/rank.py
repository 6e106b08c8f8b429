"""Inside a rank: run a recipe as ``__main__`` and leave a record of what it did.

The recipe knows nothing of this. The interpreter is let end by itself: it joins threads, ends
executors and worker processes and calls what the recipe has registered with ``atexit``. Only then,
in the very last ``atexit`` callback, is the record written. It says whether the recipe's last line
was reached or what stopped it, and what is left: a process group, files elsewhere.
``python -m rankproof.rank SPEC`` is what torchrun starts; :mod:`rankproof.warm` calls :func:`run`.
"""

import ast
import atexit
import concurrent.futures
import contextlib
import faulthandler
import itertools
import json
import linecache
import os
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path

from rankproof.imports import HARNESS
from rankproof.leader import die_with_parent, write_exit

STARTERS = (threading.__file__, os.path.dirname(concurrent.futures.__file__), HARNESS)
EXIT_OK, EXIT_FAILED = 0, 1
AT_LAST: list[Callable[[], None]] = []  # called after everything else that is to be called at exit


@atexit.register
def _at_last() -> None:  # registered before the recipe's own, so called after them
    for call in AT_LAST:
        call()


class WriteWatch:
    """Notes, by an audit hook, what this process writes outside the run's directory.

    Directories that it renames or removes are passed on at once, before it happens: ``on_renamed``
    and ``on_removed`` take absolute paths.
    """

    WRITING_EVENTS = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}

    def __init__(self, allowed: list[str]) -> None:
        self.allowed = (*(os.path.realpath(p) for p in allowed), "/dev/", "/proc/", "/memfd:")
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

    def alive(self) -> list[str]:
        """The threads that the interpreter will wait for when it ends, but torch's compiler's."""
        return sorted(
            f"{thread.name}{self.started.get(thread, ('', ''))[1]}"
            for thread in threading.enumerate()
            if thread is not threading.current_thread()
            and not thread.daemon
            and not self.started.get(thread, ("", ""))[0].startswith(self.compiler)
        )


def watch_exit(errors: list[str]) -> None:
    """Note what a callback of ``atexit`` raises: the interpreter prints it, and exits 0."""
    hook = sys.unraisablehook

    def noted(unraisable) -> None:
        if "atexit" in (unraisable.err_msg or ""):
            errors.append(f"{summary(unraisable.exc_value)} (in a callback of atexit)")
        hook(unraisable)

    sys.unraisablehook = noted


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


def _may_end_here(body: list[ast.stmt], line: int) -> bool:
    """Whether nothing but a ``finally`` follows the statement of ``body`` that holds ``line``."""
    for number, statement in enumerate(body):
        if not statement.lineno <= line <= statement.end_lineno:
            continue
        if isinstance(statement, ast.For | ast.While | ast.AsyncFor):
            return False
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            return _may_end_here(statement.body, line)
        if number + 1 < len(body):
            return False
        parts = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        parts += [handler.body for handler in getattr(statement, "handlers", [])]
        parts += [case.body for case in getattr(statement, "cases", [])]
        held = [p for p in parts if p and p[0].lineno <= line <= p[-1].end_lineno]
        return all(_may_end_here(part, line) for part in held)
    return True


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
        holding = [f for f in functions if f.lineno <= frame.lineno <= f.end_lineno]
        inner = min(holding, key=lambda f: f.end_lineno - f.lineno, default=tree)
        if frame.name == "<module>":
            inner = tree
        if not _may_end_here(inner.body, frame.lineno):
            return False
    return True


def _cleaning_up(error: BaseException) -> bool:
    """Whether ``error`` was raised in a ``finally`` or by leaving a ``with``, not in an except."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name in ("__exit__", "__aexit__"):
            return True
        with contextlib.suppress(SyntaxError):
            tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
            bodies = [node.finalbody for node in ast.walk(tree) if isinstance(node, ast.Try)]
            if any(b and b[0].lineno <= line <= b[-1].end_lineno for b in bodies):
                return True
    return False


def summary(error: BaseException) -> str:
    """The error in a line; of a CheckpointException, the first rank's cause.

    If it was raised while another one passed through a ``finally``, that one comes first.
    """
    hidden = error.__cause__ or error.__suppress_context__
    if error.__context__ and not hidden and _cleaning_up(error):
        first = summary(error.__context__)
        return f"{first} (then {type(error).__name__} while cleaning up)"
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        rank, failure = next(iter(failures.items()))
        cause = failure[0] if isinstance(failure, tuple) else failure
        return f"{type(error).__name__}, rank {rank}: {summary(cause)}"
    text = str(error).strip()
    if text.startswith("-- Process"):  # torch.multiprocessing quotes a traceback
        text = f"{text.split(':')[0].strip('- ')}: {text.splitlines()[-1]}"
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


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

    recipe, own_pid = spec["file"], os.getpid()
    sys.argv = [recipe, *spec["args"]]
    first = [*spec["import_from"], *spec["pythonpath"]]
    dropped = ("", spec["harness"], spec["cwd"], *first)
    sys.path[:] = [*first, *(p for p in sys.path if p not in dropped)]
    os.environ["PYTHONPATH"] = os.pathsep.join(spec["pythonpath"])
    if not spec["pythonpath"]:
        del os.environ["PYTHONPATH"]
    keep_temporary_directories(Path(spec["run_dir"]) / "kept")
    writes = WriteWatch([spec["run_dir"], *spec["through"]])
    deprecations = DeprecationWatch(spec["import_from"])
    threads = ThreadWatch(spec["import_from"], os.path.join(torch.__path__[0], "_inductor"))
    watch_exit(threads.errors)
    book = ledger.Ledger(ranks_dir / f"rank{rank}.notes")
    writes.on_renamed = lambda old, new: book.note("renamed", path=old, to=new)
    writes.on_removed = lambda path: book.note("removed", path=path)
    book.install()
    if spec["gate"]:
        from rankproof import gates

        gates.install(spec["gate"], book)
    recorder = None
    if spec["order"] and not torch.accelerator.is_available():  # real streams are not recorded
        from rankproof import streams

        recorder = streams.install()

    record = {
        "recipe": spec["recipe"],
        "code_sha256": spec["code_sha256"],
        "rank": rank,
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
        "torch": torch.__version__,
        "finished": False,
        "error": None,
    }

    def keep(suffix: str, content: dict) -> None:
        temporary = ranks_dir / f"rank{rank}.tmp"
        temporary.write_text(json.dumps(content))
        temporary.rename(ranks_dir / f"rank{rank}.{suffix}")

    def at_last() -> None:
        if os.getpid() != own_pid:  # a process that the recipe has forked
            return
        record["left_process_group"] = record["finished"] and _group_is_left()
        record["thread_errors"] = threads.errors
        record["wrote_elsewhere"] = sorted(writes.elsewhere)
        record["deprecations"] = deprecations.seen
        book.close(finished=record["finished"])
        keep("json", record)
        sys.stdout.flush()
        sys.stderr.flush()
        if spec["launcher"] == "warm":  # what this process was forked from need not be taken down
            os._exit(EXIT_OK if record["finished"] else EXIT_FAILED)

    AT_LAST.append(at_last)
    (ranks_dir / f"rank{rank}.began").touch()  # the deadline counts from here
    started = time.perf_counter()
    try:
        _run_as_main(recipe)
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
    record["device"], record["backend"] = book.device(), book.backend
    if recorder is not None:
        record |= recorder.report()
        streams.uninstall(recorder)
    book.hash_clones()
    if record["finished"]:
        book.last_line()
    keep("ended", record | {"threads_at_the_end": threads.alive(), "thread_errors": threads.errors})
    sys.exit(EXIT_OK if record["finished"] else EXIT_FAILED)


def _run_as_main(recipe: str) -> None:
    """Run the file as the interpreter would: its module is ``__main__`` until the very end."""
    module = types.ModuleType("__main__")
    module.__file__ = recipe
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
