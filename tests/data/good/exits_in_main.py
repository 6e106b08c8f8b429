"""sys.exit(0) is the last line of main."""

import sys


def main() -> None:
    print("trained")
    sys.exit(0)


if __name__ == "__main__":
    main()
