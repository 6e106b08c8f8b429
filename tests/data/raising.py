"""What a call raises, as a value."""

from collections.abc import Callable


def raised(call: Callable[[], object]) -> BaseException | None:
    """What ``call`` raises."""
    try:
        call()
    except BaseException as error:
        return error
    return None
