"""A handler for SIGTERM raises, and the signal comes when the script's error is being printed."""

import os
import signal
import sys


class Told:
    """Standard error, in whose first use the signal comes."""

    def write(self, _: str) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    def flush(self) -> None:
        pass


def stop(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise InterruptedError(f"asked to end by signal {number}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.stderr = Told()
    raise ValueError("the loss is not finite")
