"""What a call raises, as a value."""

from collections.abc import Callable


def raised(call: Callable[[], object]) -> BaseException | None:
    """What ``call`` raises."""
    try:
        call()
    except BaseException as error:
        return error
    return None


def assert_refused(call: Callable[[], object], kind: type, why: str) -> None:
    error = raised(call)
    assert isinstance(error, kind) and why in str(error), f"{why!r} wanted: {error!r}"
