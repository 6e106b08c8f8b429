"""Its last line calls a library that exits when the command has ended."""

import sys
from collections.abc import Callable
from contextlib import ExitStack


def command(function: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        with ExitStack():
            function()
        sys.exit(0)

    return call


@command
def main() -> None:
    print("trained")


if __name__ == "__main__":
    main()
