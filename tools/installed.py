"""Install rankproof's wheel and the library into a bare environment, and use both as anyone would.

    python tools/installed.py [options of pip install]     # make installed

README's loop runs on two ranks, twice. A folder of scripts is judged, by the command and by the
pytest plugin, and a small gallery is built with three more lines in its ``conf.py``.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "_ext"))
from site_wheel import copy_source  # noqa: E402

MOST_BYTES = 200_000

SCRIPTS = {
    "helpers.py": "def half(x):\n    return x / 2\n",
    "saves.py": """
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from helpers import half

        dist.init_process_group("gloo")
        dcp.save({"weight": half(torch.ones(4))}, checkpoint_id="step1")
        print("hello from rank", dist.get_rank())
        dist.destroy_process_group()
    """,
    "never_awaits.py": """
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        dist.init_process_group("gloo")
        group = dist.new_group(backend="gloo")
        dcp.async_save({"weight": torch.ones(4)}, checkpoint_id="step1", process_group=group)
        dist.barrier()
        dist.destroy_process_group()
    """,
}
JOIN = 'torch.distributed.init_process_group("gloo")\n'
JOIN += "model = torch.nn.parallel.DistributedDataParallel(model)\n"
CONF = """
    project = "Somebody's gallery"
    extensions = ["sphinx_gallery.gen_gallery"]
    sphinx_gallery_conf = {"examples_dirs": "examples", "gallery_dirs": "shown"}

    extensions += ["rankproof.sphinx_ext"]
    sphinx_gallery_conf["plot_gallery"] = False
    rankproof_ranks = 2
"""
PAGE = '''
    """
    Hello
    =====
    """

    import os

    print("hello from rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
'''
GALLERY = {
    "conf.py": CONF,
    "index.rst": "Somebody's gallery\n==================\n\n.. toctree::\n\n   shown/index\n",
    "examples/GALLERY_HEADER.rst": "Examples\n========\n",
    "examples/plot_hello.py": PAGE,
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text).lstrip("\n"))


def call(*command: object, cwd: Path, status: int = 0) -> str:
    """Run a command as somebody else would; print it and what it said."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "RANKPROOF"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    said = done.stdout + done.stderr
    print(f"$ {' '.join(map(str, command))}\n{said[-2500:]}", flush=True)
    assert done.returncode == status, f"exit status {done.returncode}, not {status}"
    return said


def build_wheel(into: Path) -> Path:
    """The wheel, at most MOST_BYTES, without a path of this repository in it."""
    source = shutil.copytree(ROOT / "harness", into / "source")  # building leaves files beside it
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    call(*pip, "--wheel-dir", into, source, cwd=into)
    (wheel,) = into.glob("rankproof-*.whl")
    assert wheel.stat().st_size <= MOST_BYTES
    with zipfile.ZipFile(wheel) as files:
        texts = [files.read(name).decode() for name in files.namelist()]
    assert not any(str(ROOT) in text or "recipes_source" in text for text in texts)
    return wheel


def main(pip_options: list[str]) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        root = Path(temporary)
        wheel = build_wheel(root)
        call(sys.executable, "-m", "venv", root / "bare", cwd=root)
        bin = root / "bare" / "bin"
        install = (bin / "python", "-m", "pip", "install", "-q")
        call(*install, f"{wheel}[pages,tests]", cwd=root)
        write(root / "scripts", SCRIPTS)
        told = call(bin / "rankproof", "run", "scripts", cwd=root, status=2)
        assert "there is none here: pip install torch" in told
        copy_source(root / "library")  # brings NumPy: without it, torch's ranks tell nothing
        call(*install, "torch", root / "library", *pip_options, cwd=root)
        loop = re.search("```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
        write(root / "job", {"train.py": loop.replace("optimizer =", f"{JOIN}optimizer =", 1)})
        torchrun = (bin / "torchrun", "--standalone", "--nproc-per-node=2", "train.py")
        for saves in (True, False):  # the second time, it goes on at the last save
            assert ("step200: the call took" in call(*torchrun, cwd=root / "job")) == saves
        write(root / "gallery", GALLERY)

        assert "rankproof 0." in call(bin / "rankproof", "--version", cwd=root)
        judged = call(bin / "rankproof", "run", "scripts", "--ranks", "2", cwd=root, status=1)
        assert "saves on 2 ranks: passed\n  judged: 1 save, 1 leaf" in judged
        assert "never_awaited: step1: the script ended without having waited for it" in judged
        assert "run it again: rankproof run scripts/never_awaits.py --ranks 2" in judged
        one = ("run", "scripts/saves.py", "--ranks", "1", "--json")
        assert json.loads(call(bin / "rankproof", *one, cwd=root))[0]["verdict"] == "passed"
        tested = call(bin / "pytest", "-q", "--rankproof", "scripts", cwd=root, status=1)
        assert "2 failed, 2 passed" in tested, "as it is, and with each write held"

        build = (bin / "python", "-m", "sphinx", "-b", "html", ".", "_build/html")
        call(*build, cwd=root / "gallery")
        page = (root / "gallery" / "_build" / "html" / "shown" / "plot_hello.html").read_text()
        for rank in range(2):
            assert f"hello from rank {rank} of 2" in page
    print("installed, judged, built: as it must be")


if __name__ == "__main__":
    main(sys.argv[1:])
