# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/stores/__init__.py
"""Where checkpoints lie: a directory that all ranks see, or an object store. See ``Store``."""

import re
from pathlib import Path

from .directory import Directory
from .store import Store

_HALF_A_URL = re.compile(r"(s3|s3a|gs|gcs|az|abfs)(:|//)", re.IGNORECASE)


def store_of(root: Path | str) -> Store:
    """The store of ``root``: a directory, or a URL that fsspec knows.

    Raises:
        ValueError: ``root`` is empty, a URL as a ``Path``, nearly a URL, or names no bucket; an
            endpoint in the environment is no URL.
        ImportError: it is a URL, and fsspec is not installed.
    """
    is_url = "://" in str(root)
    scheme, _, _ = str(root).partition("/")  # Path("s3://b") is "s3:/b"
    if scheme.endswith(":") and not is_url:
        raise ValueError(f"{root} has lost a slash, as a Path does: give the URL as text")
    if not is_url and _HALF_A_URL.match(str(root)):
        raise ValueError(
            f"{root} is nearly a URL, and would be a folder here: give s3://bucket/run"
        )
    if not str(root).strip():  # an empty variable of a job file
        raise ValueError("the root is empty, which would be the working directory: give a folder")
    if not is_url:
        return Directory(root)
    if not str(root).partition("://")[2].strip("/"):
        raise ValueError(f"{root} names no bucket: give s3://bucket/run")
    from .objects import Objects  # which needs fsspec

    return Objects(str(root))
