# SPDX-License-Identifier: BSD-3-Clause
"""A small S3 server for measurements: it keeps objects in memory, and checks no signature.

    python tools/s3_server.py --ms 25 --rate 40    # milliseconds a request, MB/s a connection

It prints its port, holds each request and each connection to the rates given, and serves until it
is ended.
"""

import argparse
import json
import re
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

DATE = "Sun, 29 Nov 2026 04:00:00 GMT"
BUFFER = 256 << 10  # bytes that are held to the rate at a time
CREDIT_S = 0.01  # by which a connection may be late and catch up: a busy machine sleeps long


class Pace:
    """Lets so many bytes a second pass; 0: all."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free_at = 0.0

    def take(self, nbytes: int) -> None:
        if self.rate:
            now = time.monotonic()
            self.free_at = max(self.free_at, now - CREDIT_S) + nbytes / self.rate
            time.sleep(max(0, self.free_at - now))


class S3(BaseHTTPRequestHandler):
    """One connection; what all have in common is in the class."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    delay_s = 0.0
    rate = 0.0
    lock = threading.Lock()
    objects: dict[str, list[bytes]] = {}  # in parts, as they came
    uploads: dict[str, dict[int, bytes]] = {}
    counts: Counter = Counter()

    def setup(self) -> None:
        super().setup()
        self.pace = Pace(self.rate)

    def handle_any(self) -> None:
        if self.path == "/__counts__":
            self.answer(200, json.dumps(self.counts).encode())
            self.counts.clear()
            return
        time.sleep(self.delay_s)
        body = self.body()
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        path = unquote(url.path).lstrip("/")
        with self.lock:
            self.counts["requests"] += 1
            self.counts["up"] += len(body)
        getattr(self, self.command.lower())(path, query, body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

    def body(self) -> bytes:
        left = int(self.headers.get("Content-Length", 0))
        parts = []
        while left:
            part = self.rfile.read(min(left, BUFFER))
            self.pace.take(len(part))
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def answer(
        self, status: int, content: bytes = b"", length: int | None = None, **headers
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.send_header("Last-Modified", DATE)
        self.send_header("ETag", f'"{uuid.uuid4().hex}"')
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        for start in range(0, len(content), BUFFER):
            part = content[start : start + BUFFER]
            self.pace.take(len(part))
            self.wfile.write(part)
        with self.lock:
            self.counts["down"] += len(content)

    def put(self, path: str, query: dict, body: bytes) -> None:
        source = self.headers.get("x-amz-copy-source")
        if "partNumber" in query:
            self.uploads[query["uploadId"]][int(query["partNumber"])] = body
            self.answer(200)
        elif "If-None-Match" in self.headers and path in self.objects:
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        elif source is not None:
            self.objects[path] = self.objects[unquote(source).lstrip("/")]
            self.answer(200, b'<CopyObjectResult><ETag>"x"</ETag></CopyObjectResult>')
        else:
            self.objects[path] = [body]
            self.answer(200)

    def post(self, path: str, query: dict, body: bytes) -> None:
        if "uploads" in query:
            upload = uuid.uuid4().hex
            self.uploads[upload] = {}
            self.answer_xml("InitiateMultipartUploadResult", UploadId=upload)
        elif "uploadId" in query:
            parts = self.uploads.pop(query["uploadId"])
            self.objects[path] = [parts[number] for number in sorted(parts)]
            self.answer_xml("CompleteMultipartUploadResult", ETag='"x"', Key=path)
        else:
            bucket, _, _ = path.partition("/")
            deleted = ""
            for name in re.findall("<Key>(.*?)</Key>", body.decode()):
                self.objects.pop(f"{bucket}/{name}", None)
                deleted += f"<Deleted><Key>{name}</Key></Deleted>"
            self.answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def answer_xml(self, kind: str, **fields: str) -> None:
        inside = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items())
        self.answer(200, f"<{kind}>{inside}</{kind}>".encode())

    def delete(self, path: str, query: dict, body: bytes) -> None:
        self.objects.pop(path, None)
        self.answer(204)

    def head(self, path: str, query: dict, body: bytes) -> None:
        if path in self.objects:
            self.answer(200, length=self.size_of(path))
        else:
            self.answer(404)

    def get(self, path: str, query: dict, body: bytes) -> None:
        if "/" not in path.strip("/"):
            self.list(path.strip("/"), query.get("prefix", ""), query.get("delimiter", ""))
            return
        if path not in self.objects:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        size = self.size_of(path)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            self.answer(200, self.content_of(path, 0, size))
            return
        begin = int(wanted[1])
        end = min(size, int(wanted[2] or size) + 1)
        covers = f"bytes {begin}-{end - 1}/{size}"
        self.answer(206, self.content_of(path, begin, end), Content_Range=covers)

    def size_of(self, path: str) -> int:
        return sum(len(part) for part in self.objects[path])

    def content_of(self, path: str, begin: int, end: int) -> bytes:
        found = b""
        at = 0
        for part in self.objects[path]:
            found += part[max(0, begin - at) : max(0, end - at)]
            at += len(part)
        return found

    def list(self, bucket: str, prefix: str, delimiter: str) -> None:
        folders = set()
        inside = f"<Name>{bucket}</Name><IsTruncated>false</IsTruncated>"
        for path in sorted(self.objects):
            name = path.removeprefix(f"{bucket}/")
            if not name.startswith(prefix):
                continue
            below, found, _ = name.removeprefix(prefix).partition(delimiter or "\0")
            if found:
                folders.add(f"{prefix}{below}{delimiter}")
                continue
            size = self.size_of(path)
            inside += f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size><ETag>x</ETag>"
            inside += "<LastModified>2026-11-29T04:00:00.000Z</LastModified></Contents>"
        for folder in sorted(folders):
            inside += f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
        self.answer(200, f"<ListBucketResult>{inside}</ListBucketResult>".encode())

    def log_message(self, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512  # connections that wait to be taken: many ranks come at once

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # of a client that was killed
            super().handle_error(request, client_address)


@contextmanager
def serving(ms: float, rate: float) -> Iterator[dict[str, str]]:
    """Run a server in another process; what clients need in their environment."""
    command = [sys.executable, __file__, "--ms", str(ms), "--rate", str(rate)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(server.stdout.readline())}",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ms", type=float, default=0, help="milliseconds a request")
    parser.add_argument("--rate", type=float, default=0, help="MB/s a connection; 0: all")
    asked = parser.parse_args()
    S3.delay_s = asked.ms / 1e3
    S3.rate = asked.rate * 1e6
    server = Server(("127.0.0.1", 0), S3)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
