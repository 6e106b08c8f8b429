# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/stores/in_parts.py
"""S3, Google Cloud Storage and Azure by obstore: objects go up in several parts at a time.

A part that fails is sent again, ten times at most; an upload that fails is given back.
"""

import os
from collections.abc import Iterable
from urllib.parse import urlsplit

from obstore.fsspec import FsspecStore

SCHEMES = ("s3", "gs", "az")
PART = 8 << 20  # bytes of a part of an upload, unless it would have more than MOST_PARTS
MOST_PARTS = 10_000  # that a store takes
CONNECTIONS = 12  # of an upload
RETRIES = 10  # of a request
_ENDPOINTS = (  # variables that obstore reads
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
)
_CLIENT = {"allow_http": True, "timeout": "300s"}  # of a part: many ranks may share a slow line


class InParts(FsspecStore):
    """A file system of fsspec, with what obstore's own leaves out or makes slow.

    Credentials are those in the environment, or of the machine's role.

    Raises:
        ValueError: the environment names an endpoint that is no URL.
    """

    cachable = False  # fsspec would give each thread connections of its own

    def __init__(self, scheme: str) -> None:
        _refuse_endpoints()
        super().__init__(scheme, client_options=_CLIENT, retry_config={"max_retries": RETRIES})

    def at(self, path: str) -> tuple:
        """The store of the path's bucket, and the name of the object in it."""
        bucket, name = self._split_path(path)
        return self._construct_store(bucket), name

    def send(self, path: str, nbytes: int, parts: Iterable[memoryview]) -> None:
        """Make an object of ``parts``, which have so many bytes together and are not copied."""
        store, name = self.at(path)
        of_part = max(PART, -(-nbytes // MOST_PARTS))
        several = nbytes > of_part
        store.put(
            name,
            iter(parts),
            use_multipart=several,
            chunk_size=of_part,
            max_concurrency=CONNECTIONS,
        )

    def cat_file(self, path: str, start: int | None = None, end: int | None = None):
        """On the calling thread, so that several read at a time."""
        store, name = self.at(path)
        if start is None:
            return store.get(name).bytes().to_bytes()
        return store.get_range(name, start=start, end=end)

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **others) -> None:
        store, name = self.at(path)
        await store.put_async(name, value, mode=mode)

    def rm(self, path: str, recursive: bool = False) -> None:
        store, name = self.at(path)
        names = [name]
        if recursive:
            names = []
            for some in store.list(name):
                names.extend(found["path"] for found in some)
        store.delete(names)


def _refuse_endpoints() -> None:
    """Of one without ``http://`` obstore panics, and says nothing of the variable."""
    for name in _ENDPOINTS:
        endpoint = os.environ.get(name)
        if endpoint is None:
            continue
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(
                f"{name}={endpoint} is no URL: set it to http://host:port or https://host, or "
                f"unset it"
            )
