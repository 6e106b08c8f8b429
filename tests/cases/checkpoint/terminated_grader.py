"""EgoVerse#621, dagster#25749: a grader in a forked process is ended when it takes too long.

The process that asks for it is under ``Preemption``; SIGTERM must end its child as it ends any.
"""

import multiprocessing
import time

import roundtrip

from overlap_recipes.checkpoint.preemption import Preemption

GRADES_S = 60
ENDS_WITHIN_S = 2


def grade(begun) -> None:
    begun.set()
    time.sleep(GRADES_S)


def main() -> None:
    preemption = Preemption(grace_s=15)
    with roundtrip.job(), preemption:
        fork = multiprocessing.get_context("fork")
        begun = fork.Event()
        grader = fork.Process(target=grade, args=(begun,))
        grader.start()
        begun.wait()
        grader.terminate()
        grader.join(ENDS_WITHIN_S)
        is_alive = grader.is_alive()
        grader.kill()
        grader.join()
        assert not is_alive, f"a forked child runs {ENDS_WITHIN_S} s after SIGTERM"
        assert not preemption.agreed(), "the parent took the child's signal for its own"


if __name__ == "__main__":
    main()
