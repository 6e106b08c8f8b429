"""What the ranks of ``test_sharding_on_gpu.py`` run: one launch by torchrun measures everything.

    torchrun --standalone --nproc-per-node 2 tests/fsdp2/ranks_program.py OUTPUT.json [OPTION]

An option leaves out the rest: ``--gathers``, ``--in-place`` or ``--own``. Rank 0 writes to the
output what the tests look at.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from edited_recipes import EDITED, PROOFS, ROOT, SHARDING
from watched_schedules import RUNS, measure_overlaps
from widened_races import IN_PLACE, RACES, Race, is_wrong


def main(output: Path, runs: int = RUNS, races: tuple[Race, ...] = RACES + IN_PLACE) -> None:
    sys.path[:0] = [str(ROOT), str(SHARDING), str(PROOFS)]
    EDITED.append(output.parent)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    try:
        found: dict = {"right": {}, "wrong": {}, "overlaps": {}}
        for race in races:
            found["right"][race.name] = not is_wrong(race, None, device)
            found["wrong"][race.name] = is_wrong(race, race.control, device)
            if dist.get_rank() == 0:
                print(race.name, found["right"][race.name], found["wrong"][race.name], flush=True)
            write(found, output)
        for name, traced_runs in measure_overlaps(device, output.parent, runs) if runs else ():
            found["overlaps"][name] = traced_runs
            write(found, output)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def write(found: dict, output: Path) -> None:
    if dist.get_rank() == 0:
        output.write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[2:] == ["--gathers"]:
        main(Path(sys.argv[1]), runs=1, races=())
    elif sys.argv[2:] == ["--in-place"]:
        main(Path(sys.argv[1]), runs=0, races=IN_PLACE)
    elif sys.argv[2:] == ["--own"]:
        main(Path(sys.argv[1]), runs=0, races=RACES)
    else:
        main(Path(sys.argv[1]))
