"""A thread raises, and nobody sees it."""

import threading


def work() -> None:
    raise OSError("No space left on device")


if __name__ == "__main__":
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
