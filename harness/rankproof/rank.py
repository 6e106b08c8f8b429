"""Inside a rank: run a recipe as ``__main__`` and leave a record of what it did.

The recipe knows nothing of this. The interpreter is let end by itself: it joins threads, ends
executors and worker processes and calls what the recipe has registered with ``atexit``. Only then,
in the very last ``atexit`` callback, is the record written. It says whether the recipe's last line
was reached or what stopped it, and what is left: a process group, files elsewhere.
``python -m rankproof.rank SPEC`` is what torchrun starts; :mod:`rankproof.server` calls
:func:`run`.
"""

import atexit
import contextlib
import faulthandler
import importlib.util
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path

from rankproof.errors import summary
from rankproof.last_line import ExitWatch, exits_at_its_end, group_is_left
from rankproof.leader import die_with_parent, write_exit
from rankproof.protocol import Edited, Record, Spec, own_number
from rankproof.watches import (
    ChildWatch,
    FileWatch,
    ThreadWatch,
    keep_temporary_directories,
    watch_deprecations,
)

AT_LAST: list[Callable[[], None]] = []  # called after everything else that is to be called at exit


@atexit.register
def _at_last() -> None:  # registered before the recipe's own, so called after them
    for call in AT_LAST:
        call()


class RunningRank:
    """This process as a rank: what watches the script, and the record that it leaves."""

    def __init__(self, spec: Spec) -> None:
        import torch

        from rankproof.ledger import Ledger

        self.spec = spec
        self.pid = os.getpid()
        self.stem = spec.ranks_dir / f"rank{own_number()}"
        self.files = FileWatch([spec.run_dir, *spec.through])
        self.threads = ThreadWatch()
        self.children = ChildWatch()
        self.book = Ledger(self.stem.with_suffix(".notes"))
        self.exits = ExitWatch(spec.file, self.book.has_joined, self.ends_at_once)
        self.order = contextlib.ExitStack()  # undone when the script has ended
        self.recorder = None
        self.started = 0.0
        self.record = Record(
            torch=torch.__version__,
            thread_errors=self.threads.errors,
            deprecations=watch_deprecations(spec.own_folders),
        )

    @property
    def is_forked(self) -> bool:
        """Whether this is a process that the recipe has forked, which is no rank."""
        return os.getpid() != self.pid

    def watch(self) -> None:
        """Stand between the script and what it calls."""
        import torch

        self.files.on_written = self.book.written_to
        self.files.on_renamed = lambda old, new: self.book.note("renamed", path=old, to=new)
        self.files.on_removed = lambda path: self.book.note("removed", path=path)
        self.book.install()
        if self.spec.gate:
            from rankproof import gates

            gates.install(self.spec.gate, self.book)
        if self.spec.order and not torch.accelerator.is_available():  # real ones are not recorded
            from rankproof.streams import recording

            self.recorder = self.order.enter_context(recording())
        AT_LAST.append(self.at_last)

    def begin(self) -> None:
        """The script begins, and so does its time."""
        self.stem.with_suffix(".began").touch()
        self.started = time.perf_counter()

    # How the script ended

    def exited(self, error: SystemExit) -> None:
        """It called ``sys.exit``, or raised what that raises."""
        record = self.record
        record.exit = repr(error.code)
        record.finished = exits_at_its_end(error, self.spec.file)
        if not record.finished and error.code in (None, 0) and self.exits.had_left_group(error):
            record.left_early = f"sys.exit({error.code!r})"
            record.finished = True
        if not record.finished:
            print_from_recipe(error, self.spec.file)

    def raised(self, error: BaseException) -> None:
        self.record.error = summary(error)
        print_from_recipe(error, self.spec.file)

    def has_ended(self) -> None:
        """Nothing of the script runs any more but its threads and what it has registered."""
        record = self.record
        record.seconds = time.perf_counter() - self.started
        record.device = self.book.device()
        record.backend = self.book.backend
        if self.recorder is not None:
            record.order = self.recorder.report()
        self.order.close()
        self.book.hash_clones()
        if record.finished:
            self.book.last_line()
        record.misfit = not_the_edited_file(self.spec.edited)
        record.threads_at_the_end = self.threads.alive()
        record.write(self.stem.with_suffix(".ended"))

    def ends_at_once(self, how: str) -> None:
        """The script calls ``os._exit(0)``, where it may; ``how``: empty at its last line."""
        self.record.finished = True
        self.record.left_early = how
        self.has_ended()
        self.write_last()

    def at_last(self) -> None:
        if not self.is_forked:
            self.write_last()

    def write_last(self) -> None:
        """The record as it is at the process's end."""
        record = self.record
        record.left_process_group = record.finished and group_is_left()
        record.dead_children = self.children.died()
        record.wrote_elsewhere = sorted(self.files.elsewhere)
        self.book.close(finished=record.finished)
        record.write(self.stem.with_suffix(".json"))
        with contextlib.suppress(Exception):  # the script may have closed them
            sys.stdout.flush()
            sys.stderr.flush()


def not_the_edited_file(edited: Edited | None) -> str:
    """What is wrong where a module was edited and another file, or none, was imported."""
    if edited is None:
        return ""
    module = sys.modules.get(edited.name)
    if module is None:
        return f"the edited {edited.name} was never imported"
    file = getattr(module, "__file__", None)
    return "" if file == edited.file else f"{file} was imported, not the edited file"


def print_from_recipe(error: BaseException, recipe: str) -> None:
    """Print the traceback from the recipe's own first frame on, without the harness's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != recipe:
        frames = frames.tb_next
    with contextlib.suppress(Exception):  # the script may have closed what it would be printed to
        traceback.print_exception(error.with_traceback(frames or error.__traceback__))


def _redirect(output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)


def _callers_paths(spec: Spec) -> None:
    """Import from where the script would, not from where the harness lies."""
    first = [*spec.import_from, *spec.pythonpath]
    dropped = ("", spec.harness, spec.cwd, *first)
    sys.path[:] = [*first, *(p for p in sys.path if p not in dropped)]
    os.environ["PYTHONPATH"] = os.pathsep.join(spec.pythonpath)
    if not spec.pythonpath:
        del os.environ["PYTHONPATH"]


def run(spec: Spec) -> None:
    """Run ``spec.file`` in this process and exit; the record is written at the very end.

    The environment holds RANK, WORLD_SIZE and the rendezvous, as torchrun sets them.
    """
    stem = spec.ranks_dir / f"rank{own_number()}"
    _redirect(stem.with_suffix(".out"))
    stacks = open(stem.with_suffix(".stacks"), "w")  # noqa: SIM115 (open until the end)
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    stem.with_suffix(".pid").write_text(str(os.getpid()))  # SIGUSR1 is safe from now on

    import rankproof.ledger  # noqa: F401 (and torch, before the script's folders are on the path)

    sys.argv = [spec.file, *spec.args]
    _callers_paths(spec)
    keep_temporary_directories(Path(spec.run_dir) / "kept")
    rank = RunningRank(spec)
    record = rank.record
    rank.watch()
    rank.begin()
    try:
        try:
            _run_as_main(spec.file, spec.module)
            record.finished = True
        except SystemExit as error:
            if rank.is_forked:
                raise
            rank.exited(error)
        except BaseException as error:
            rank.raised(error)
        if not rank.is_forked:
            rank.has_ended()
    except BaseException as error:  # a handler of the script's for a signal that came only now
        if rank.is_forked:
            raise
        record.error = record.error or summary(error)
    sys.exit(not record.finished)


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


def main(spec_path: str) -> None:
    """Run the rank in a child, keep its wait status, end as it ended.

    The status is written here because torchrun tells nobody what became of each rank.
    """
    spec = Spec.read(spec_path)
    parent = os.getppid()
    me = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(me)
        run(spec)
    die_with_parent(parent)
    status = os.waitpid(child, 0)[1]
    write_exit(spec.ranks_dir, own_number(), status)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1])
