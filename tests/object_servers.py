"""Object stores on loopback, and a proxy that gives them bad days."""

import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY, SECRET = "key-of-the-tests", "secret-of-the-tests"
BIN = Path(sys.executable).parent
READY_S = 60
ERRORS = {  # status, code
    "slow down": (503, "SlowDown"),
    "internal error": (500, "InternalError"),
    "unavailable": (503, "ServiceUnavailable"),
    "request timeout": (400, "RequestTimeout"),
    "refuse": (400, "InvalidRequest"),
    "denied": (403, "AccessDenied"),
    "expired": (400, "ExpiredToken"),
    "no upload": (404, "NoSuchUpload"),
}


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def serving(command: list[str], url: str, log: Path) -> Iterator[str]:
    """Run a server until the block ends; it is ready when ``url`` gives any answer."""
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + READY_S
        while True:
            try:
                urllib.request.urlopen(url, timeout=2).close()
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                assert server.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < until, f"{command[0]} is not ready"
                time.sleep(0.1)
        yield url
    finally:
        server.kill()  # SeaweedFS takes ten seconds to heed SIGTERM
        server.wait()


@contextmanager
def seaweedfs(directory: Path) -> Iterator[str]:
    """An S3 server that knows one key; the URL of its end point."""
    names = ["master", "volume", "filer", "s3"]
    ports = free_ports(2 * len(names))
    actions = ["Admin", "Read", "Write", "List"]
    who = {"name": "tests", "actions": actions}
    who["credentials"] = [{"accessKey": KEY, "secretKey": SECRET}]
    (directory / "s3.json").write_text(json.dumps({"identities": [who]}))
    command = [shutil.which("weed", path=BIN) or "weed", "-logtostderr=true", "server", "-s3"]
    command += [f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer"]
    command += [f"-s3.config={directory}/s3.json", "-master.volumeSizeLimitMB=64", "-volume.max=20"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # whose ports are fixed otherwise
    for n, name in enumerate(names):
        command += [f"-{name}.port={ports[2 * n]}", f"-{name}.port.grpc={ports[2 * n + 1]}"]
    with serving(command, f"http://127.0.0.1:{ports[6]}", directory / "log") as url:
        yield url


@contextmanager
def rclone(directory: Path) -> Iterator[str]:
    """``rclone serve s3``: a server that ignores ``If-None-Match``."""
    (port,) = free_ports(1)
    served = directory / "served"
    served.mkdir()
    command = [shutil.which("rclone", path=BIN) or "rclone", "serve", "s3", str(served)]
    command += ["--config", str(directory / "none"), "--auth-key", f"{KEY},{SECRET}"]
    command += ["--addr", f"127.0.0.1:{port}"]
    with serving(command, f"http://127.0.0.1:{port}", directory / "log") as url:
        yield url


class Proxy:
    """Passes requests on, unless ``trouble(method, path)`` names what befalls one.

    One of ``ERRORS``: that is the answer. ``"lost answer"``: the request arrives, its answer does
    not. ``"hold"``: it waits, for ever. A proxy before a real server, not moto: moto 5.2.5 answers
    400 for every error that its model of S3 does not list, 503 among them, so a client's retries
    would go untested; and what it keeps after an error is its own.
    """

    def __init__(self, target: str) -> None:
        self.trouble: Callable[[str, str], str | None] = lambda method, path: None
        self.held = threading.Event()
        self.requests: list[tuple[str, str]] = []
        host = target.removeprefix("http://")
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                proxy.requests.append((self.command, self.path))
                trouble = proxy.trouble(self.command, self.path)
                if trouble == "hold":
                    proxy.held.set()
                    threading.Event().wait()
                if trouble in ERRORS:
                    status, code = ERRORS[trouble]
                    self.answer(status, [], f"<Error><Code>{code}</Code></Error>".encode())
                    return
                headers = {k: v for k, v in self.headers.items() if k.lower() != "expect"}
                upstream = http.client.HTTPConnection(host, timeout=30)
                upstream.request(self.command, self.path, body, headers)
                got = upstream.getresponse()
                content = got.read()
                upstream.close()
                if trouble == "lost answer":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.answer(got.status, got.getheaders(), content)

            def answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
                self.send_response(status)
                length = len(content)
                for name, value in headers:
                    if self.command == "HEAD" and name.lower() == "content-length":
                        length = value
                    elif name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
