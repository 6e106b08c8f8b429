"""Have a server run a file on ranks: the caller's side of :mod:`rankproof.server`."""

import atexit
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from rankproof import judge
from rankproof.protocol import INTERRUPTED, RANKS, Outcome, Spec
from rankproof.recipe import DCP

HOME = str(Path(__file__).resolve().parent.parent)  # what to put on a path to import rankproof
INSTALLED = HOME in map(os.path.realpath, site.getsitepackages())  # it is on every path already
LOAD_BACK = Path(__file__).with_name("load_back.py")
SERVERS_OWN = "rankproof-server-"
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


class _Servers(threading.local):
    """Those of one thread, by what each has imported."""

    def __init__(self) -> None:
        self.by_modules: dict[tuple[str, ...], Server] = {}

    def with_modules(self, modules: tuple[str, ...]) -> Server:
        server = self.by_modules.get(modules)
        if server is None or server.process.poll() is not None:
            server = Server(modules)
            self.by_modules[modules] = server
        return server


servers = _Servers()


def callers_path() -> list[str]:
    """The caller's PYTHONPATH without this repository, which a recipe does not see."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [path for path in map(os.path.abspath, filter(None, entries)) if path != HOME]


def _environment(tmp: Path) -> dict[str, str]:
    """The environment of a rank: the caller's, without what would leak in or write elsewhere."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)}
    return env | {
        "TMPDIR": str(tmp),
        "TRITON_CACHE_DIR": str(tmp / "triton"),
        "PYTHONPATH": os.pathsep.join([HOME, *callers_path()]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def new_spec(run_dir: Path, file: Path, ranks: int, deadline_s: float) -> Spec:
    """What is to run in ``run_dir``, as a process forked from a warm one; its folders are made."""
    for name in (RANKS, "work", "tmp", "dir", "kept"):
        (run_dir / name).mkdir()
    return Spec(
        run_dir=str(run_dir),
        file=str(file),
        ranks=ranks,
        env=_environment(run_dir / "tmp"),
        deadline_s=deadline_s,
        pythonpath=callers_path(),
        harness="" if INSTALLED else HOME,
    )


def launch(spec: Spec, modules: tuple[str, ...]) -> None:
    """Have a server that has imported ``modules`` run it; return when nothing of it is left."""
    spec.write()
    servers.with_modules(modules).run(spec.path)


def load_back(
    request: dict[str, dict], world_size: int, parent: Path, deadline_s: float
) -> dict[str, dict]:
    """Load the checkpoints of ``request`` in fresh processes; see :mod:`rankproof.load_back`."""
    run_dir = parent / f"load{world_size}"
    run_dir.mkdir()
    asked = run_dir / "request.json"
    answered = run_dir / "answer.json"
    asked.write_text(json.dumps(request))
    spec = new_spec(run_dir, LOAD_BACK, world_size, deadline_s)
    spec.args = [str(asked), str(answered)]
    spec.import_from = [HOME]
    spec.callers_dir = str(parent)
    launch(spec, DCP)
    if answered.exists():
        return json.loads(answered.read_text())
    outcome = Outcome.read(run_dir)
    error = "the loading process wrote nothing"
    if outcome is not None and outcome.timed_out:
        error = f"did not load within {deadline_s:g} s"
    else:
        for rank in judge.read_ranks(run_dir, world_size):
            if rank.output.strip():
                error = rank.output.strip().splitlines()[-1]
                break
    return {directory: {"error": error} for directory in request}
