"""Uses something that its library will remove."""

import warnings


def old_name() -> None:
    warnings.warn("old_name is deprecated; use new_name", DeprecationWarning, stacklevel=2)


if __name__ == "__main__":
    old_name()
