# SPDX-License-Identifier: BSD-3-Clause
"""What a save to an object store and a load of it take, beside other ways to move the same bytes.

    python tools/object_stores.py            # 252 MB; 25 ms a request, 40 MB/s a connection
    python tools/object_stores.py --mb 1000 --ms 5 --rate 80 --repeats 5

The store is a small S3 server in another process, which keeps objects in memory, checks no
signature, and holds each request and each connection to the rates given. Needs obstore and s3fs.
"""

import argparse
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

import s3fs
import torch
import torch.distributed.checkpoint as dcp
from obstore.store import from_url
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from overlap_recipes.checkpoint import CheckpointManager, TrainingState
from overlap_recipes.checkpoint.loading import load_newest

DATE = "Sun, 29 Nov 2026 04:00:00 GMT"
BUFFER = 256 << 10  # bytes that are held to the rate at a time
CREDIT_S = 0.01  # by which a connection may be late and catch up: a busy machine sleeps long
PIECE = 8 << 20  # bytes of a request of the peers
BUCKET = "bucket"


# -- the server


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


def serve(ms: float, rate: float) -> None:
    """Print the port, and serve until this process is ended."""
    S3.delay_s = ms / 1e3
    S3.rate = rate * 1e6
    server = Server(("127.0.0.1", 0), S3)
    print(server.server_address[1], flush=True)
    server.serve_forever()


# -- what is compared: each saves and loads the tensors of a training state


class Job:
    """A model with its optimizer, in so many bytes."""

    def __init__(self, nbytes: int) -> None:
        width = 512
        layers = nbytes // (12 * width * width)  # a parameter and AdamW's moments: 12 bytes
        self.model = torch.nn.Sequential()
        for _ in range(layers):
            self.model.append(torch.nn.Linear(width, width, bias=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {}
        for number, (parameter, moments) in enumerate(self.optimizer.state.items()):
            found[f"{number}"] = parameter.detach()
            found[f"{number}.m"] = moments["exp_avg"]
            found[f"{number}.v"] = moments["exp_avg_sq"]
        return found

    def bytes(self) -> memoryview:
        flat = torch.cat([tensor.flatten() for tensor in self.tensors().values()])
        return memoryview(flat.numpy()).cast("B")


class Ours:
    """``save`` of a manager, in its block, and what its ``resume`` does."""

    def __init__(self, job: Job) -> None:
        self.state = TrainingState(job.model, job.optimizer)
        url = f"s3://{BUCKET}/ours"
        self.manager = CheckpointManager(url, self.state, keep_last=2, grace_s=None)
        self.manager.__enter__()
        self.step = 1
        self.manager.save(1).result()  # which locks memory, and plans

    def save(self) -> None:
        self.step += 1
        self.manager.save(self.step).result()

    def load(self) -> None:
        assert load_newest({"app": self.state}, self.manager.store, None, ()) == self.step

    def close(self) -> None:
        self.manager.__exit__(None, None, None)


class Obstore:
    """The same bytes as one object: parts of 5 MB, twelve at a time; ranges by sixteen threads."""

    def __init__(self, job: Job) -> None:
        self.store = from_url(f"s3://{BUCKET}", client_options={"allow_http": True})
        self.data = job.bytes()
        self.loaded = memoryview(bytearray(len(self.data)))

    def save(self) -> None:
        self.store.put("obstore", self.data)

    def load_piece(self, begin: int) -> None:
        end = min(begin + PIECE, len(self.data))
        self.loaded[begin:end] = memoryview(self.store.get_range("obstore", start=begin, end=end))

    def load(self) -> None:
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(self.load_piece, range(0, len(self.data), PIECE)))

    def close(self) -> None:
        assert self.loaded == self.data


class S3fs(Obstore):
    """The same by ``pipe_file``, which sends ten parts at a time, and ``cat_ranges``."""

    def __init__(self, job: Job) -> None:
        self.fs = s3fs.S3FileSystem()
        self.data = job.bytes()

    def save(self) -> None:
        self.fs.pipe_file(f"{BUCKET}/s3fs", bytes(self.data), chunksize=PIECE)

    def load(self) -> None:
        begins = range(0, len(self.data), PIECE)
        ends = [min(begin + PIECE, len(self.data)) for begin in begins]
        paths = [f"{BUCKET}/s3fs" for _ in begins]
        self.loaded = b"".join(self.fs.cat_ranges(paths, list(begins), ends))


class Dcp:
    """``dcp.save`` and ``dcp.load`` with torch's own writer and reader for fsspec."""

    def __init__(self, job: Job) -> None:
        self.tensors = job.tensors()
        self.url = f"s3://{BUCKET}/dcp"

    def save(self) -> None:
        dcp.save(self.tensors, storage_writer=FsspecWriter(self.url), no_dist=True)

    def load(self) -> None:
        dcp.load(self.tensors, storage_reader=FsspecReader(self.url), no_dist=True)

    def close(self) -> None:
        pass


WAYS = {"ours": Ours, "obstore": Obstore, "s3fs": S3fs, "dcp": Dcp}


class Written(logging.Handler):
    """Takes from the library's log how long a save was written after its copies."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "written in" in record.msg:
            self.seconds.append(record.args[-1])


class Watch:
    """Seconds, CPU seconds, bytes over the wire, and the most memory above that at the begin."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/__counts__"
        self.is_over = False

    def counts(self) -> Counter:
        with urllib.request.urlopen(self.url) as answer:
            return Counter(json.load(answer))

    def sample(self) -> None:
        while not self.is_over:
            self.most = max(self.most, resident())
            time.sleep(0.005)

    def measure(self, do: Callable[[], None]) -> dict[str, float]:
        self.counts()  # which forgets those before
        at_begin = resident()
        self.most = at_begin
        self.is_over = False
        sampler = threading.Thread(target=self.sample)
        sampler.start()
        cpu = time.process_time()
        began = time.monotonic()
        do()
        seconds = time.monotonic() - began
        cpu = time.process_time() - cpu
        self.is_over = True
        sampler.join()
        counts = self.counts()
        moved = counts["up"] + counts["down"]
        held = self.most - at_begin
        requests = counts["requests"]
        return {"s": seconds, "cpu_s": cpu, "moved": moved, "held": held, "requests": requests}


def resident() -> int:
    """Bytes of memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=252)
    parser.add_argument("--ms", type=float, default=25, help="milliseconds a request")
    parser.add_argument("--rate", type=float, default=40, help="MB/s a connection")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.ms, options.rate)
    command = [sys.executable, __file__, "--serve", "--ms", f"{options.ms}"]
    command += ["--rate", f"{options.rate}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        compare(options, int(server.stdout.readline()))
    finally:
        server.kill()


def compare(options: argparse.Namespace, port: int) -> None:
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    written = Written()
    log = logging.getLogger("overlap_recipes.checkpoint.writing")
    log.setLevel(logging.INFO)
    log.addHandler(written)
    watch = Watch(port)
    job = Job(options.mb * 1_000_000)
    ways = {name: WAYS[name](job) for name in options.ways}
    nbytes = len(job.bytes())
    print(f"{nbytes / 1e6:.0f} MB; medians of {options.repeats}")
    measured: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for _ in range(options.repeats):  # in turns: what else runs here befalls all alike
        for name, way in ways.items():
            for what in ("save", "load"):
                measured[name, what].append(watch.measure(getattr(way, what)))
    for way in ways.values():
        way.close()
    if written.seconds:
        seconds = statistics.median(written.seconds[1:])
        print(f"ours: of a save {seconds:.2f} s were writing, the rest copies and comparisons")
    for what in ("save", "load"):
        for name in ways:
            runs = measured[name, what]
            median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            print(
                f"{name:8} {what}  {median['s']:6.2f} s  CPU {median['cpu_s']:5.2f} s  "
                f"over the wire {median['moved'] / nbytes:5.3f}  in {median['requests']:4.0f} "
                f"requests  memory +{max(run['held'] for run in runs) / 1e6:4.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
