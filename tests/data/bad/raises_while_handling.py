"""Raises while it handles another exception: the second is the cause."""

if __name__ == "__main__":
    try:
        open("not there").close()
    except FileNotFoundError:
        raise ValueError("the batch is empty")  # noqa: B904
