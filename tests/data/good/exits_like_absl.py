"""Hands main's result to sys.exit."""

import sys


def run(main, argv: list[str]) -> None:
    sys.exit(main(argv))


def main(argv: list[str]) -> None:
    print("trained", len(argv))


if __name__ == "__main__":
    run(main, sys.argv)
