"""What the tests ask of the faults: ``echo '["trials", 16, 1]' | python -m faults.ask``.

Each line of JSON is answered by one, from a process forked for it, which forks ranks: all of them
have imported torch. An answer is an exit code, and what was printed: JSON in its last line.
"""

import json
import random
import shutil
from pathlib import Path

from fork_server import serve
from kept_saves import newest_step, wrong

from faults import edits, power_cut, soak
from faults.points import Fault

SECOND_COMMIT = 11  # the hit of point "rename" on rank 0 just before the second checkpoint is named


def trials(scratch: Path, count: str, seed: str) -> list[dict]:
    """The first ``count`` trials of ``seed``."""
    observer = soak.Observer(scratch)
    return [observer.trial(n, *observer.plan(n, int(seed))) for n in range(int(count))]


def killed(scratch: Path, name: str = "") -> dict:
    """A kill just before a checkpoint gets its name, with a line of the recipes edited or not."""
    edit = edits.BY_KILL[name] if name else None
    observer = soak.Observer(scratch, edit)
    fault = Fault("kill", "rename", 0, SECOND_COMMIT)
    return observer.trial(0, fault, random.Random(0))


def preempted(scratch: Path, *names: str) -> dict:
    """Each case of :mod:`faults.preempted`."""
    from faults.preempted import case

    return {name: case(scratch, name) for name in names}


def deletion(scratch: Path) -> dict:
    """See :mod:`faults.troubles`."""
    from faults import troubles

    return troubles.deletion_fails(scratch)


def lease(scratch: Path) -> str:
    from faults import troubles

    return troubles.lease_of_a_killed_rank(scratch)


def cut(scratch: Path, seed: str, chances: str, *names: str) -> dict:
    """The states that a power cut may leave, and the first that is wrong, for each edit named."""
    answers = {}
    for number, name in enumerate(("", *names)):
        root, log = scratch / f"root{number}", scratch / f"log{number}"
        edit = edits.BY_POWER_CUT[name] if name else None
        root.mkdir()
        told = soak.run_job(
            root, scratch / f"job{number}", edit=edit, log=power_cut.OperationLog(root, log)
        )
        assert len(told.ended) == soak.RANKS, told
        states, lost = 0, None
        for state, durable, what in power_cut.cuts(log, scratch, int(seed), int(chances)):
            states += 1
            found = power_cut.judge(state, durable, newest_step, wrong)
            if found:
                lost = f"{what}: {found}"
                break
        answers[name] = {"states": states, "wrong": lost, "committed": sorted(told.durable())}
    return answers


def answer(what: str, *arguments: object) -> int:
    """In a process of its own: print what one of the functions above returns."""
    scratch = soak.scratch_directory()
    try:
        print(json.dumps(globals()[what](scratch, *map(str, arguments))))
        return 0
    finally:
        shutil.rmtree(scratch)


def main() -> None:
    serve(answer)


if __name__ == "__main__":
    main()
