"""Whether a job that was interrupted has the weights of one that was not.

judge.py OUTPUT...    what ranks of one job have said, in the order of its starts

Where the number of ranks has changed, the other job changes it after the same steps. Exit status 1
if the weights differ, or the job has no end.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TRAIN = Path(__file__).resolve().with_name("train.py")
BEGINS = re.compile(r"^(\S+) .*rank 0: begins after step (\d+), one of (\d+) ranks", re.MULTILINE)
ENDS = re.compile(r"ends after step (\d+), weights (\w+)")


def parts_of(said: str) -> list[tuple[int, int]]:
    """How many ranks the job had, until which step: ``[(2, 40), (1, 100)]``."""
    starts = [(int(step), int(ranks)) for _, step, ranks in sorted(BEGINS.findall(said))]
    last_step = int(ENDS.search(said)[1])
    parts = []
    for number, (_, ranks) in enumerate(starts):
        until = last_step
        if number + 1 < len(starts):
            until = starts[number + 1][0]
        if parts and parts[-1][0] == ranks:
            parts[-1] = ranks, until
        elif until > 0:
            parts.append((ranks, until))
    return parts


def weights_of(parts: list[tuple[int, int]], directory: Path) -> str:
    """Train without interruption, on those ranks, until those steps."""
    environment = {**os.environ, "PACE": "0"}
    for name in [*environment]:
        if name.startswith("SLURM"):
            del environment[name]
    for ranks, until in parts:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += [f"--nproc-per-node={ranks}", str(TRAIN), str(directory), str(until)]
        ran = subprocess.run(
            torchrun, env=environment, check=False, capture_output=True, text=True, timeout=300
        )
        if ran.returncode:
            raise RuntimeError(f"{torchrun} ended with {ran.returncode}: {ran.stderr[-2000:]}")
    return ENDS.search(ran.stdout)[2]


def main() -> int:
    said = "\n".join(Path(file).read_text(errors="replace") for file in sys.argv[1:])
    ends = {weights for _, weights in ENDS.findall(said)}
    if len(ends) != 1:
        print(f"NO END: ranks ended with {sorted(ends)}")
        return 1
    parts = parts_of(said)
    known = Path(os.environ.get("KNOWN", os.devnull)) / str(parts)  # asked once a call
    if known.exists():
        expected = known.read_text()
    else:
        with tempfile.TemporaryDirectory() as directory:
            expected = weights_of(parts, Path(directory) / "run")
        if known.parent.is_dir():
            known.write_text(expected)
    shown = ", then ".join(f"{ranks} ranks until step {until}" for ranks, until in parts)
    equal = ends == {expected}
    print(f"{'equal bits' if equal else 'OTHER BITS'}: {ends.pop()} and {expected}; {shown}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
