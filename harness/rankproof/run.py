"""Run a recipe on several ranks and report what it did: the harness's public face."""

import ast
import atexit
import contextlib
import json
import os
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

from rankproof.judge import (
    KINDS,
    Failure,
    Rank,
    SavedState,
    checkpoint_directories,
    chunks_by_directory,
    gather_saves,
    judge_checkpoints,
    judge_ranks,
    judge_saves,
    read_ranks,
    some,
    unjudged,
)
from rankproof.recipe import (
    DCP,
    DEFAULT_DEADLINE_S,
    GATES,
    Control,
    RecipeError,
    code_sha256,
    may_save,
    with_imports,
)

HOME = str(Path(__file__).resolve().parent.parent)  # what to put on a path to import rankproof
INSTALLED = HOME in map(os.path.realpath, site.getsitepackages())  # it is on every path already
COMMAND = os.environ.get("RANKPROOF_COMMAND", "rankproof")  # how a person calls this
TAIL_LINES = 25
LAUNCHERS = ("auto", "torchrun", "warm", "python")
VERDICTS = {"passed": 0, "failed": 1, "not judged": 2}  # and their exit statuses
OWN_STARTS = ("spawn", "start_processes")
RENDEZVOUS = ("MASTER_PORT", "MASTER_ADDR", "RANK", "WORLD_SIZE")
LOAD_BACK = Path(__file__).with_name("load_back.py")
NO_MOUNTS = (
    "not judged: files that C++ code or subprocesses write outside the run's directory, for this "
    "system lets nobody make private mounts"
)
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
    """What a run did. ``failures`` is empty if every rank proved its claim."""

    recipe: str
    path: str
    code_sha256: str
    ranks: int
    launcher: str
    command: str
    control: str | None = None
    gate: str | None = None
    device: str = ""
    torch: str = ""
    python: str = ".".join(map(str, sys.version_info[:3]))
    seconds: float = 0.0
    outputs: list[str] = field(default_factory=list)
    stacks: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    judged: dict[str, int | str] = field(default_factory=dict)
    unjudged: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def verdict(self) -> str:
        """A key of VERDICTS; ``not judged`` where something was not, see ``unjudged``."""
        return "failed" if self.failures else "not judged" if self.unjudged else "passed"

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
        lines = [f"{self.recipe} on {self.ranks} rank{plural}: {shown}"]
        for failure in self.failures:
            where = "" if failure.rank is None else f" [rank {failure.rank}]"
            lines.append(f"  {failure.kind}{where}: {failure.text}")
            lines += [f"    {failure.hint}"] if failure.hint else []
        lines += [f"  not judged: {reason}" for reason in self.unjudged]
        if self.ok and self.judged:
            said = ", ".join(f"{value} {what}" for what, value in self.judged.items())
            lines.append(f"  judged: {said}")
        lines += [f"  note: {note}" for note in self.notes]
        if self.ok:
            return "\n".join(lines)
        for title, texts in (("last lines", self.outputs), ("stacks at the deadline", self.stacks)):
            for rank, text in enumerate(texts):
                if text or title == "last lines":
                    lines += [f"--- rank {rank}, {title}", *text.splitlines()[-TAIL_LINES:]]
        return "\n".join([*lines, f"run it again: {self.command}"])


class Server:
    """A process of this process's own that starts runs; see :mod:`rankproof.server`."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.tmp = tempfile.mkdtemp(prefix="rankproof-server-")
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
            self.close()  # its answer to this spec would be taken for the answer to the next one
            raise

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        shutil.rmtree(self.tmp, ignore_errors=True)


class _Servers(threading.local):
    """This thread's servers, by what each has imported."""

    def __init__(self) -> None:
        self.by_modules: dict[tuple[str, ...], Server] = {}

    def get(self, modules: tuple[str, ...]) -> Server:
        found = self.by_modules.get(modules)
        if found is None or found.process.poll() is not None:
            found = self.by_modules[modules] = Server(modules)
        return found


_servers = _Servers()


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
    } | settings
    (run_dir / "spec.json").write_text(json.dumps(spec))
    _servers.get(modules).run(run_dir / "spec.json")


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
        recipe="load_back",
        code_sha256="",
        deadline_s=deadline_s,
    )
    if answered.exists():
        return json.loads(answered.read_text())
    error = f"did not load within {deadline_s:g} s"
    if not json.loads((run_dir / "outcome.json").read_text())["timed_out"]:
        outputs = [rank.output.strip() for rank in read_ranks(run_dir, world_size) if rank.output]
        error = (outputs or ["the loading process wrote nothing"])[0].splitlines()[-1]
    return {directory: {"error": error} for directory in request}


def own_ranks(source: str) -> tuple[str, str]:
    """Where a script starts its ranks itself, and where it sets their rendezvous; empty if not."""
    starts = sets = ""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in OWN_STARTS:
            starts = starts or f"{node.func.attr}, line {node.lineno}"
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            key = node.targets[0].slice
            if isinstance(key, ast.Constant) and key.value in RENDEZVOUS:
                sets = sets or f"{key.value}, line {node.lineno}"
    return starts, sets


def reproduce(
    path: Path,
    ranks: int,
    control: Control | None,
    gate: str | None,
    order: bool,
    args: tuple[str, ...],
) -> str:
    """The command that runs the same again."""
    with contextlib.suppress(ValueError):
        path = path.relative_to(Path.cwd())
    command = f"{COMMAND} run {shlex.quote(str(path))} --ranks {ranks}"
    if control is not None:
        command += f" --control {control.name}"
    if gate and (control is None or gate != control.gate):
        command += f" --gate {gate}"
    if order and control is None:  # a control says itself whether it is about order
        command += " --order"
    return command + (f" -- {shlex.join(args)}" if args else "")


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
        through: directories that the recipe may write to and that keep what it writes.

    Raises:
        RecipeError: there is no such file or gate, ``ranks`` is not positive, ``keep`` exists, or
            the edit does not fit.
    """
    path = Path(path).resolve()
    for wrong, message in (
        (not path.is_file(), f"{path}: no such recipe; pass the path of a Python file"),
        (ranks < 1, f"{ranks} ranks: pass a number of 1 or more"),
        (launcher not in LAUNCHERS, f"no launcher '{launcher}'; there are {', '.join(LAUNCHERS)}"),
        (sys.platform != "linux", "ranks are judged on Linux only: it needs subreapers and /proc"),
        (gate not in (None, *GATES), f"no gate '{gate}'; there are {', '.join(GATES)}"),
        (keep and keep.exists(), f"{keep} exists already; pass a directory that does not"),
    ):
        if wrong:
            raise RecipeError(message)
    source = path.read_text(encoding="utf-8")
    if control is not None:
        source, order = control.apply(source), control.order
        gate = gate or control.gate
    if deadline_s is None:
        deadline_s = control.deadline_s if control else DEFAULT_DEADLINE_S
    starts, sets = own_ranks(source)
    if launcher == "auto":
        launcher = "python" if starts else "torchrun"
    processes = 1 if launcher == "python" else ranks
    report = Report(
        recipe=path.stem,
        path=str(path),
        code_sha256=code_sha256(path),
        ranks=processes,
        launcher=launcher,
        command=reproduce(path, ranks, control, gate, order, args),
        control=control.name if control else None,
        gate=gate,
    )
    if starts and launcher != "python":
        report.unjudged = [f"it starts its ranks itself ({starts}): use --launcher python"]
        return report
    run_dir = Path(tempfile.mkdtemp(prefix=f"rankproof-{path.stem}-"))
    try:
        file = path
        if control is not None:
            file = run_dir / "edited" / path.name
            file.parent.mkdir()
            file.write_text(source, encoding="utf-8")
        accepts_dir = '"--dir"' in source or "'--dir'" in source
        started = time.monotonic()
        _launch(
            run_dir,
            file,
            ranks,
            DCP if may_save(path) else (),
            launcher=launcher,
            processes=processes,
            through=[str(Path(folder).resolve()) for folder in through],
            args=[*(["--dir", str(run_dir / "dir")] if accepts_dir else []), *args],
            import_from=list(dict.fromkeys(str(f.parent) for f in [file, *with_imports(path)])),
            recipe=path.stem,
            code_sha256=report.code_sha256,
            deadline_s=deadline_s,
            gate=gate,
            order=order,
        )
        report.seconds = time.monotonic() - started
        _judge(report, run_dir, deadline_s, order)
        if report.failures and sets and launcher != "python":
            report.unjudged = [
                f"it sets its ranks' rendezvous itself ({sets}), which a launcher does for it; "
                f"what came of it: {report.failures[0].text}"
            ]
            report.failures = []
        return report
    finally:
        if keep is not None:
            shutil.copytree(run_dir, keep, symlinks=True)
        shutil.rmtree(run_dir, ignore_errors=True)


def _judge(report: Report, run_dir: Path, deadline_s: float, order: bool) -> None:
    """Fill in what the run left behind."""

    def readable(text: str) -> str:
        return text.replace(str(run_dir), "<run>")

    ranks = read_ranks(run_dir, report.ranks)
    report.outputs = [readable(rank.output) for rank in ranks]
    log = "".join(p.read_text(errors="replace") for p in run_dir.glob("*.out")).strip()[-2000:]
    if not (run_dir / "outcome.json").exists():
        text = f"the leader ended before the ranks did: {log}"
        report.failures = [Failure("missing_record", text)]
        return
    outcome = json.loads((run_dir / "outcome.json").read_text())
    if outcome["timed_out"]:
        report.stacks = [rank.stacks for rank in ranks]
    saves = gather_saves(ranks)
    failures = judge_ranks(ranks, outcome["timed_out"], saves)
    if left := outcome["left_processes"]:
        failures.append(Failure("left_process", "; ".join(sorted(left))))
    cached, elsewhere = _written(outcome, ranks)
    if elsewhere:
        failures.append(Failure("wrote_elsewhere", some(elsewhere)))
    report.notes += [f"written to caches: {some(cached)}"] if cached else []
    report.notes += [] if outcome["private"] else [NO_MOUNTS]
    if not failures and (missing := [str(r.number) for r in ranks if r.record is None]):
        text = f"no record of ranks {', '.join(missing)}; {log}"
        failures.append(Failure("missing_record", text))
    failures += judge_saves(run_dir, saves, went_well=not failures)
    directories, loaded = checkpoint_directories(run_dir, saves), {}
    if directories:
        request = chunks_by_directory(directories, saves)
        plain = not (report.control or report.gate)
        sizes = (1, 2) if plain and report.ranks == 1 else (1,)  # reshard once a recipe
        limit = max(deadline_s, DEFAULT_DEADLINE_S)
        loaded = {size: load_back(request, size, run_dir, limit) for size in sizes}
        failures += judge_checkpoints(saves, directories, loaded)
    for failure in failures:
        failure.text = readable(failure.text)
    report.failures = failures
    report.unjudged = [readable(text) for text in unjudged(saves, directories, loaded)]
    report.judged = _judged(report, saves, loaded, ranks, order)
    report.checkpoints = [Path(d).name for d in directories]
    if records := [rank.record for rank in ranks if rank.record]:
        device, backend = records[0]["device"], records[0]["backend"] or "no process group"
        count = f"{len(records)} × " if device != "CPU" else ""
        report.device, report.torch = f"{count}{device}, {backend}", records[0]["torch"]


def _written(outcome: dict, ranks: list[Rank]) -> tuple[list[str], list[str]]:
    """What was written to caches, and elsewhere.

    Where places were private, what was left in them counts, not what was ever opened there.
    """
    private = tuple(f"{place}/" for place in outcome["private"])
    seen = {path for rank in ranks for path in (rank.record or {}).get("wrote_elsewhere", [])}
    cached = {path for path in [*outcome["written"], *seen] if path.startswith(_caches())}
    seen = {path for path in seen if not path.startswith(private)} | set(outcome["written"])
    return sorted(cached), sorted(seen - cached)


def _judged(
    report: Report, saves: list[SavedState], loaded: dict, ranks: list[Rank], order: bool
) -> dict:
    """What a pass rests on."""
    answers = [answer for by_name in loaded.values() for answer in by_name.values()]
    leaves = [leaf for answer in answers for leaf in answer.get("leaves", {}).values()]
    judged: dict[str, int | str] = {"saves": len(saves)}
    if leaves:
        judged["leaves"] = len(leaves)
        judged["bytes"] = sum(leaf.get("bytes", 0) for leaf in leaves)
        judged["rank(s) loaded on"] = " and ".join(map(str, loaded))
    if report.gate:
        judged["held by the gate"] = report.gate
    records = [rank.record for rank in ranks if rank.record and "streams" in rank.record]
    if records:
        judged["streams"] = max(record["streams"] for record in records)
        judged["accesses"] = sum(record["accesses"] for record in records)
        if not judged["streams"]:
            report.notes.append("no stream was made, so there was no order to judge")
    elif order:
        report.notes.append("stream order is not judged where there is an accelerator")
    return judged


__all__ = ["KINDS", "Failure", "Report", "load_back", "run"]
