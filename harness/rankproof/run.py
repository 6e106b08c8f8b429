"""Run a recipe on several ranks and report what it did: the harness's public face."""

import atexit
import contextlib
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rankproof import judge
from rankproof.judge import Failure, Rank, SavedState, some
from rankproof.recipe import (
    DCP,
    DEFAULT_DEADLINE_S,
    Control,
    Recipe,
    RecipeError,
    find_gate,
    load_module,
    load_recipe,
    package_of,
)
from rankproof.sources import parse, read
from rankproof.starts import own_ranks, takes_dir

HOME = str(Path(__file__).resolve().parent.parent)  # what to put on a path to import rankproof
GROUPS_UNSEEN = "whether the ranks that it starts leave their process groups is not seen"
SAVES_UNSEEN = "what the processes that it starts save is not seen"
MAY_WRITE_HINT = "if that is where it is to write: --allow DIR"
INSTALLED = HOME in map(os.path.realpath, site.getsitepackages())  # it is on every path already
COMMAND = os.environ.get("RANKPROOF_COMMAND", "rankproof")  # how a person calls this
TAIL_LINES = 25
OPTIONAL = (  # kinds that a project may turn off: its habits, no lost work
    "child_died",
    "deprecation_warning",
    "exited_early",
    "left_process",
    "left_process_group",
    "left_thread",
    "wrote_elsewhere",
)
LAUNCHERS = ("auto", "torchrun", "warm", "python")
JUDGED = ("saves", "leaves", "streams", "asynchronous collectives")
VERDICTS = {"passed": 0, "failed": 1, "not judged": 2}  # and their exit statuses
LOAD_BACK = Path(__file__).with_name("load_back.py")
SERVERS_OWN = "rankproof-server-"
INTERRUPTED = "interrupted"  # a file beside a spec: its caller lives, and removes the run itself
NO_MOUNTS = "not judged: what C++ code and subprocesses write elsewhere (no private mounts here)"
_NOT_PASSED_ON = (
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "MASTER_",
    "GROUP_",
    "TORCHELASTIC",
    "PYTEST",
    "PYTHONOPTIMIZE",  # it would drop the assertions that are a recipe's claims
    "COV_",
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it in the caller's environment, to a shared place
    "TRITON_CACHE_DIR",
)


@dataclass
class Report:
    """What a run did. ``ok`` if every rank proved its claim."""

    recipe: str
    path: str
    ranks: int
    launcher: str
    command: str
    control: str | None = None
    gate: str | None = None
    device: str = ""
    torch: str = ""
    seconds: float = 0.0
    outputs: list[str] = field(default_factory=list)
    stacks: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    judged: dict[str, int | str] = field(default_factory=dict)
    unjudged: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    conclusive: bool = True  # False: it was not run, or what failed may not be the script's

    @property
    def ok(self) -> bool:
        """Whether every rank ended as it must; of what it saved, a part may be ``unjudged``."""
        return self.conclusive and not self.failures

    def give_up(self, why: str) -> None:
        """Say that nothing is known of the script."""
        self.unjudged = [why]
        self.failures = []
        self.conclusive = False

    @property
    def why_not_ok(self) -> list[str]:
        """What failed, or why nothing is known of it; empty if ``ok``."""
        found = [f"{failure.kind}: {failure.text}" for failure in self.failures]
        if not self.conclusive:
            found += [f"not judged: {reason}" for reason in self.unjudged]
        return found

    @property
    def verdict(self) -> str:
        """A key of VERDICTS; ``not judged`` where something was not, see ``unjudged``."""
        if self.failures:
            return "failed"
        return "not judged" if self.unjudged else "passed"

    @property
    def nothing_to_judge(self) -> bool:
        """Whether the script saved nothing and no order was recorded, however it ended."""
        return not any(self.judged.get(what) for what in JUDGED)

    @property
    def exit_code(self) -> int:
        return VERDICTS[self.verdict]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of failure that occurred."""
        return frozenset(failure.kind for failure in self.failures)

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, table: dict) -> "Report":
        return cls(**table | {"failures": [Failure(**f) for f in table["failures"]]})

    def describe(self) -> str:
        """A text for a person: what failed, the last lines of each rank, how to run it again."""
        plural = "s" if self.ranks > 1 else ""
        shown = self.verdict if self.verdict == "passed" else self.verdict.upper()
        if self.verdict == "passed" and self.nothing_to_judge:
            shown = "ran; nothing to judge"
        lines = [f"{self.recipe} on {self.ranks} rank{plural}: {shown}"]
        for failure in self.failures:
            where = "" if failure.rank is None else f" [rank {failure.rank}]"
            lines.append(f"  {failure.kind}{where}: {failure.text}")
            if failure.hint:
                lines.append(f"    {failure.hint}")
        lines += [f"  not judged: {reason}" for reason in self.unjudged]
        if self.ok and self.judged and not self.nothing_to_judge:
            said = ", ".join(f"{value} {what}" for what, value in self.judged.items())
            lines.append(f"  judged: {said}")
        lines += [f"  note: {note}" for note in self.notes]
        if not self.failures:
            return "\n".join(lines)
        for title, texts in (("last lines", self.outputs), ("stacks at the deadline", self.stacks)):
            for rank, text in enumerate(texts):
                if text or title == "last lines":
                    lines += [f"--- rank {rank}, {title}", *text.splitlines()[-TAIL_LINES:]]
        return "\n".join([*lines, f"run it again: {self.command}"])


class Server:
    """A process of this process's own that starts runs; see :mod:`rankproof.server`."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.tmp = tempfile.mkdtemp(prefix=SERVERS_OWN)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rankproof.server", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HOME,
            env=_environment(Path(self.tmp)) | {"PYTHONPATH": HOME},
            start_new_session=True,
        )
        atexit.register(self.close)

    def run(self, spec_path: Path) -> None:
        """Run a spec; return when nothing of it is left. If interrupted, end it and this server."""
        try:
            self.process.stdin.write(f"{spec_path}\n")
            self.process.stdin.flush()
            if not self.process.stdout.readline():
                raise RuntimeError("the harness's server ended; its error is above")
        except BaseException:
            spec_path.with_name(INTERRUPTED).touch()  # what was run is still its caller's
            self.close()  # its answer to this spec would be taken for the answer to the next one
            raise

    def close(self) -> None:
        self.process.communicate()  # it ends when nobody can ask it any more
        shutil.rmtree(self.tmp, ignore_errors=True)


_own = threading.local()  # its __dict__: this thread's servers, by what each has imported


def _server(modules: tuple[str, ...]) -> Server:
    servers = _own.__dict__
    if modules not in servers or servers[modules].process.poll() is not None:
        servers[modules] = Server(modules)
    return servers[modules]


def _callers_path() -> list[str]:
    """The caller's PYTHONPATH without this repository, which a recipe does not see."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [path for path in map(os.path.abspath, filter(None, entries)) if path != HOME]


def _environment(tmp: Path) -> dict[str, str]:
    """The environment of a rank: the caller's, without what would leak in or write elsewhere."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)}
    return env | {
        "TMPDIR": str(tmp),
        "TRITON_CACHE_DIR": str(tmp / "triton"),
        "PYTHONPATH": os.pathsep.join([HOME, *_callers_path()]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def _caches() -> tuple[str, ...]:
    """Where programs keep what they have downloaded or compiled: listed, no failure."""
    named = [os.environ.get(name, "") for name in ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")]
    usual = [f"~/{name}" for name in (".cache", ".triton", ".nv", ".config/matplotlib")]
    return tuple(os.path.realpath(os.path.expanduser(p)) + "/" for p in [*named, *usual] if p)


def _launch(run_dir: Path, file: Path, ranks: int, modules: tuple[str, ...], **settings) -> None:
    """Have a server run a file in ``run_dir``; return when nothing of it is left."""
    for name in ("ranks", "work", "tmp", "dir", "kept"):
        (run_dir / name).mkdir()
    spec = {
        "run_dir": str(run_dir),
        "callers_dir": str(run_dir),
        "file": str(file),
        "ranks": ranks,
        "cwd": str(run_dir / "work"),
        "env": _environment(run_dir / "tmp"),
        "launcher": "warm",
        "processes": ranks,
        "through": [],
        "harness": "" if INSTALLED else HOME,
        "pythonpath": _callers_path(),
        "gate": None,
        "order": False,
        "edited": None,
        "own_folders": [],
        "module": "",
    } | settings
    (run_dir / "spec.json").write_text(json.dumps(spec))
    _server(modules).run(run_dir / "spec.json")


def load_back(
    request: dict[str, dict], world_size: int, parent: Path, deadline_s: float
) -> dict[str, dict]:
    """Load the checkpoints of ``request`` in fresh processes; see :mod:`rankproof.load_back`."""
    run_dir = parent / f"load{world_size}"
    run_dir.mkdir()
    asked, answered = run_dir / "request.json", run_dir / "answer.json"
    asked.write_text(json.dumps(request))
    _launch(
        run_dir,
        LOAD_BACK,
        world_size,
        DCP,
        args=[str(asked), str(answered)],
        import_from=[HOME],
        callers_dir=str(parent),
        deadline_s=deadline_s,
    )
    if answered.exists():
        return json.loads(answered.read_text())
    error = f"did not load within {deadline_s:g} s"
    if not json.loads((run_dir / "outcome.json").read_text())["timed_out"]:
        said = [rank.output.strip() for rank in judge.read_ranks(run_dir, world_size)]
        written = [text for text in said if text] or ["the loading process wrote nothing"]
        error = written[0].splitlines()[-1]
    return {directory: {"error": error} for directory in request}


def reproduce(path: Path | str, args: tuple[str, ...], **options: object) -> str:
    """The command that runs the same again.

    ``path`` is a file, or a text that stands there as it is, such as ``-m package.module``. An
    option that is a tuple is given once for each of its values; True needs no value; what is
    empty is left out.
    """
    if isinstance(path, Path):
        with contextlib.suppress(ValueError):
            path = path.relative_to(Path.cwd())
        path = shlex.quote(str(path))
    words = [COMMAND, "run", path]
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        for one in values:
            if one is True:
                words.append(f"--{name}")
            elif one:
                words.append(f"--{name} {shlex.quote(str(one))}")
    if args:
        words.append(f"-- {shlex.join(args)}")
    return " ".join(words)


def run(
    path: Path | str,
    ranks: int,
    *,
    launcher: str = "torchrun",
    control: Control | None = None,
    gate: str | None = None,
    order: bool = False,
    deadline_s: float | None = None,
    args: tuple[str, ...] = (),
    keep: Path | None = None,
    through: tuple[Path, ...] = (),
    cwd: Path | None = None,
    off: tuple[str, ...] = (),
    module: str | None = None,
) -> Report:
    """Run the recipe at ``path`` on ``ranks`` ranks and judge it.

    Args:
        launcher: ``"torchrun"`` for the real thing, ``"warm"`` to fork from a process that has
            imported torch, ``"python"`` for a script that starts its ranks itself (``ranks`` is
            then its own affair), ``"auto"`` for python or torchrun, as the script needs it.
        control: run the recipe with this edit, its gate and its deadline.
        gate: hold a background step, see :mod:`rankproof.gates`.
        order: record stream order on CPU, see :mod:`rankproof.streams`.
        deadline_s: seconds from the recipe's first line until every rank is stopped; the
            control's, or 120, if not given.
        args: more arguments for the recipe. ``--dir`` is added if its source knows it.
        keep: a directory that receives the run's files (created; must not exist).
        through: directories that the recipe may write to, or make, and that keep what it writes.
        cwd: the working directory, for a script that reads files beside itself; an empty one,
            where the script may write, if not given.
        off: kinds of failure that are not to count, see :data:`OPTIONAL`; they become notes.
        module: run the module of this name, as ``python -m`` does; ``path`` is then the folder
            that its package lies in.

    Raises:
        RecipeError: there is no such file or kind, no gate of that name, ``ranks`` is not
            positive, ``keep`` exists, ``cwd`` does not, or the edit does not fit.
        SourceError: what the recipe imports from its project is not UTF-8, or not valid Python.
    """
    recipe = load_module(module, Path(path).resolve()) if module else load_recipe(path)
    path = recipe.path
    _refuse(ranks, launcher, keep, cwd, off)
    command = reproduce(
        f"-m {module}" if module else path,
        args,
        ranks=ranks,
        control=control.name if control is not None else None,
        gate=gate,
        order=order and control is None,  # a control says that itself
        launcher=launcher if launcher != "auto" else None,
        deadline=f"{deadline_s:g}" if deadline_s not in (None, recipe.deadline_s) else None,
        cwd=cwd,
        allow=through,
        off=off,
    )
    if control is not None:
        order = control.order
        gate = gate or control.gate
        deadline_s = deadline_s or control.deadline_s
    if gate is not None:
        gate = find_gate(gate)
    deadline_s = deadline_s or DEFAULT_DEADLINE_S
    beside = {}
    for name, file in recipe.sources.files.items():
        parse(file)  # raises: a package on the way to a module is parsed nowhere else
        beside[name] = read(file)
    starts, sets_rendezvous = own_ranks(read(path), beside)
    if launcher == "auto":
        launcher = "python" if starts else "torchrun"
    processes = 1 if launcher == "python" else ranks
    report = Report(
        recipe=recipe.name,
        path=str(path),
        ranks=processes,
        launcher=launcher,
        command=command,
        control=control.name if control is not None else None,
        gate=gate,
    )
    if starts and launcher != "python":
        report.give_up(f"it starts its ranks itself ({starts}): use --launcher python")
        return report
    run_dir = Path(tempfile.mkdtemp(prefix=f"rankproof-{recipe.name}-"))
    try:
        file = path
        edited = None
        import_from = list(recipe.import_path)
        if control is not None:
            name, edited_file = control.edited(recipe, run_dir / "edited")
            import_from.insert(0, run_dir / "edited")
            if edited_file.name == path.name and name == path.stem:
                file = edited_file
            else:
                edited = {"name": name, "file": str(edited_file)}
        own_folders = {source.parent for source in recipe.files}
        own_folders |= {file.parent, run_dir / "edited"}
        own_args = ["--dir", str(run_dir / "dir")] if accepts_dir(recipe) else []
        started = time.monotonic()
        _launch(
            run_dir,
            file,
            ranks,
            DCP if recipe.saves else (),
            launcher=launcher,
            processes=processes,
            through=[str(Path(folder).resolve()) for folder in through],
            args=own_args + list(args),
            import_from=[str(folder) for folder in import_from],
            own_folders=sorted(str(folder) for folder in own_folders),
            cwd=str(cwd.resolve() if cwd else run_dir / "work"),
            edited=edited,
            module=recipe.module,
            deadline_s=deadline_s,
            gate=gate,
            order=order,
        )
        report.seconds = time.monotonic() - started
        _keep_made(run_dir / "made", through)
        _judge(report, run_dir, deadline_s, order, own_places(recipe), off)
        _turn_off(report, off)
        if launcher == "python":
            report.notes.append(GROUPS_UNSEEN)
            if recipe.saves and report.nothing_to_judge:
                report.unjudged = report.unjudged or [SAVES_UNSEEN]
        _do_not_judge_a_taken_port(report)
        if report.kinds == {"raised"}:
            if cwd is None:
                _hint_at_files_beside(report, path.parent)
            _hint_at_its_package(report, path)
        if sets_rendezvous and launcher != "python":
            _do_not_judge_its_rendezvous(report, sets_rendezvous)
        return report
    finally:
        if keep is not None:
            shutil.copytree(run_dir, keep, symlinks=True)
        shutil.rmtree(run_dir, ignore_errors=True)


def _refuse(
    ranks: int,
    launcher: str,
    keep: Path | None,
    cwd: Path | None,
    off: tuple[str, ...],
) -> None:
    """Raise a RecipeError for what no run can be started with."""
    if ranks < 1:
        raise RecipeError(f"{ranks} ranks: pass a number of 1 or more")
    if launcher not in LAUNCHERS:
        raise RecipeError(f"no launcher '{launcher}'; there are {', '.join(LAUNCHERS)}")
    if sys.platform != "linux":
        raise RecipeError("ranks are judged on Linux only: it needs subreapers and /proc")
    if keep and keep.exists():
        raise RecipeError(f"{keep} exists already; pass a directory that does not")
    if cwd and not cwd.is_dir():
        raise RecipeError(f"--cwd {cwd}: no such directory")
    if set(off) - set(OPTIONAL):
        raise RecipeError(f"--off {', '.join(off)}: only {', '.join(OPTIONAL)} can be")


def _keep_made(made: Path, through: tuple[Path, ...]) -> None:
    """Put directories that the script was allowed, and has made, where they belong."""
    for number, folder in enumerate(through):
        own = made / str(number)
        if own.is_dir():
            shutil.copytree(own, Path(folder).resolve(), symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(own)  # else its checkpoints would be found twice


def _do_not_judge_a_taken_port(report: Report) -> None:
    """Drop all failures where one is that a port was taken: it is not the script's."""
    for failure in report.failures:
        if judge.TAKEN_PORT.search(failure.text):
            why = "a port was taken, by this run or another program"
            report.give_up(f"{why}: {failure.text}")
            return


def _do_not_judge_its_rendezvous(report: Report, sets: str) -> None:
    """Drop failures that all may come of ranks that did not find each other.

    ``sets`` says where the script sets the rendezvous itself.
    """
    if report.failures and all(_of_starting(failure) for failure in report.failures):
        why = f"it sets its ranks' rendezvous itself ({sets}), which a launcher does for it"
        report.give_up(f"{why}; what came of it: {report.failures[0].text}")


def _of_starting(failure: Failure) -> bool:
    """Whether a failure may be that of ranks that did not find each other."""
    if failure.kind == "raised":
        return judge.NO_RENDEZVOUS.search(failure.text) is not None
    return failure.kind in ("hung", "killed", "missing_record")


def _turn_off(report: Report, off: tuple[str, ...]) -> None:
    """Make notes of failures of kinds that are turned off."""
    report.notes += [f"{f.kind} is turned off: {f.text}" for f in report.failures if f.kind in off]
    report.failures = [failure for failure in report.failures if failure.kind not in off]


def _hint_at_files_beside(report: Report, folder: Path) -> None:
    """Say ``--cwd`` where a file was not found that lies beside the script."""
    for failure in report.failures:
        named = re.search(r"No such file or directory: '([^'/][^']*)'", failure.text)
        if named and (folder / named[1]).exists():
            failure.hint = f"it lies beside the script: run it with --cwd {folder}"


def _hint_at_its_package(report: Report, path: Path) -> None:
    """Say ``-m`` where a file imports relative to a package that it was not started in."""
    for failure in report.failures:
        if "with no known parent package" in failure.text:
            folder, name = package_of(path)
            failure.hint = f"it is part of a package: in {folder}, -m {name}"


def accepts_dir(recipe: Recipe) -> bool:
    """Whether the script, or a file that it imports from beside it, takes ``--dir PATH``."""
    sources = [file.read_text(encoding="utf-8") for file in recipe.flat_files]
    return any(takes_dir(source) for source in sources)


def own_places(recipe: Recipe) -> tuple[str, ...]:
    """Where a script's project lies; nothing is to be written there, not for a moment either."""
    found = {recipe.path.parent, *(file.parent for file in recipe.files)}
    if recipe.root is not None:
        found.add(recipe.root)
    return tuple(f"{os.path.realpath(folder)}/" for folder in found)


def _judge(
    report: Report,
    run_dir: Path,
    deadline_s: float,
    order: bool,
    own: tuple[str, ...],
    off: tuple[str, ...],
) -> None:
    """Fill in what the run left behind."""

    def readable(text: str) -> str:
        return text.replace(str(run_dir), "<run>")

    ranks = judge.read_ranks(run_dir, report.ranks)
    report.outputs = [readable(rank.output) for rank in ranks]
    log = "".join(p.read_text(errors="replace") for p in run_dir.glob("*.out")).strip()[-2000:]
    if not (run_dir / "outcome.json").exists():
        text = f"the leader ended before the ranks did: {log}"
        report.failures = [Failure("missing_record", text)]
        return
    outcome = json.loads((run_dir / "outcome.json").read_text())
    if outcome["timed_out"]:
        report.stacks = [rank.stacks for rank in ranks]
    saves = judge.gather_saves(ranks)
    failures = judge.judge_ranks(ranks, outcome["timed_out"], saves)
    left = outcome["left_processes"]
    if left:
        failures.append(Failure("left_process", "; ".join(sorted(left))))
    cached, elsewhere = _written(outcome, ranks, own)
    if elsewhere:
        failures.append(Failure("wrote_elsewhere", some(elsewhere), hint=MAY_WRITE_HINT))
    if cached:
        report.notes.append(f"written to caches: {some(cached)}")
    if not outcome["private"]:
        report.notes.append(NO_MOUNTS)
    went_well = all(failure.kind in off for failure in failures)  # what is off excuses no lost save
    missing = judge.without_record(ranks)
    if missing and went_well:
        text = f"{missing}; {log}" if log else missing
        failures.append(Failure("missing_record", text))
        went_well = False
    failures += judge.judge_saves(run_dir, saves, went_well)
    directories = judge.checkpoint_directories(run_dir, saves)
    loaded = {}  # by the number of loading ranks
    if directories:
        request = judge.chunks_by_directory(directories, saves)
        limit = max(deadline_s, DEFAULT_DEADLINE_S)
        loaded[1] = load_back(request, 1, run_dir, limit)
        if report.ranks == 1 and not report.control and not report.gate:  # once a recipe
            loaded[2] = load_back(request, 2, run_dir, limit)
        counted = () if "wrote_elsewhere" in off else tuple(elsewhere)
        failures += judge.judge_checkpoints(saves, directories, loaded, counted)
    for failure in failures:
        failure.text = readable(failure.text)
    report.failures = failures
    report.unjudged = [readable(text) for text in judge.unjudged(saves, directories, loaded)]
    report.checkpoints = list(dict.fromkeys(Path(d).name for d in directories))
    report.notes += judge.not_compared(saves, directories)
    report.judged = _judged(report, saves, loaded)
    records = [rank.record for rank in ranks if rank.record]
    _say_what_order_was_judged(report, records, order)
    if records:
        device = records[0]["device"]
        backend = records[0]["backend"] or "no process group"
        count = f"{len(records)} × " if device != "CPU" else ""
        report.device = f"{count}{device}, {backend}"
        report.torch = records[0]["torch"]


def _say_what_order_was_judged(report: Report, records: list[dict], order: bool) -> None:
    """Counts of what ranks recorded of streams; ``order``: whether they were to."""
    recorded = [record for record in records if "streams" in record]
    if not recorded:
        if order:
            report.notes.append("stream order is not judged where there is an accelerator")
        return
    streams = max(record["streams"] for record in recorded)
    collectives = max(record["async_collectives"] for record in recorded)
    report.judged["streams"] = streams
    report.judged["accesses"] = sum(record["accesses"] for record in recorded)
    if collectives:
        report.judged["asynchronous collectives"] = collectives
    is_judged = any(failure.kind == "unordered_access" for failure in report.failures)
    if not streams and not collectives and not is_judged:
        report.notes.append("no stream was made, so there was no order to judge")


def _written(outcome: dict, ranks: list[Rank], own: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """What was written to caches, and elsewhere.

    Where places were private, what was left in them counts, not what was ever opened there: a
    script may use ``/tmp``. In its own project, what was opened counts, wherever that lies. A
    directory that torch 2.9 makes when it is imported is the server's: each forked rank removes it.
    """
    servers_own = f"-{tempfile.gettempdir()}/{SERVERS_OWN}"  # "-": it was removed
    written = {path for path in outcome["written"] if not path.startswith(servers_own)}
    private = tuple(f"{place}/" for place in outcome["private"])
    own = tuple(place for place in own if place not in private)  # a script in /tmp itself
    seen = set()  # opened by ranks, to be written
    for rank in ranks:
        if rank.record is not None:
            seen.update(rank.record.get("wrote_elsewhere", []))
    cached = {path for path in written | seen if path.startswith(_caches())}
    elsewhere = set(written)
    for path in seen:
        if path.startswith(own) or not path.startswith(private):
            elsewhere.add(path)
    return sorted(cached), sorted(elsewhere - cached)


def _judged(report: Report, saves: list[SavedState], loaded: dict) -> dict[str, int | str]:
    """What a pass rests on."""
    leaves = []
    for answers in loaded.values():
        for answer in answers.values():
            leaves += answer.get("leaves", {}).values()
    judged: dict[str, int | str] = {"saves": len(judge.compared(saves, loaded))}
    if leaves:
        judged["leaves"] = len(leaves)
        judged["bytes"] = sum(leaf.get("bytes", 0) for leaf in leaves)
        judged["rank(s) loaded on"] = " and ".join(map(str, loaded))
    if report.gate:
        judged["held by the gate"] = report.gate
    return judged
