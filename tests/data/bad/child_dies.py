"""A process that it has started dies, and nobody looks."""

import multiprocessing


def prepare() -> None:
    raise ValueError("no such shard")


if __name__ == "__main__":
    process = multiprocessing.Process(target=prepare, name="prepares")
    process.start()
    process.join()
