"""A callback of atexit raises."""

import atexit


def finish() -> None:
    raise OSError("the last log was not written")


if __name__ == "__main__":
    atexit.register(finish)
