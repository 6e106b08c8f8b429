"""Checkpoints in an object store, against servers on loopback: one commit, nothing torn."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from object_servers import ERRORS, KEY, SECRET, Proxy, rclone, seaweedfs
from selection import REPO, edited_module, with_library

pytest.importorskip("s3fs")
pytest.importorskip("obstore")
PAGE = REPO / "recipes_source" / "checkpoint" / "saves_beside_training.py"

from kept_saves import KeptSaves, resume, steps_in  # noqa: E402
from obstore.exceptions import BaseError  # noqa: E402

from overlap_recipes.checkpoint.stores import in_parts, objects  # noqa: E402
from overlap_recipes.checkpoint.stores.objects import Objects  # noqa: E402

BIG = 3_000_000  # float32 numbers: three parts of the least size that S3 allows
PART = 5 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as url:
        yield url


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the server, as this process's S3; a bucket named ``bucket``."""
    proxy = Proxy(server)
    as_s3(proxy.url, monkeypatch)
    make_bucket()
    yield proxy
    proxy.close()


def as_s3(url: str, monkeypatch: pytest.MonkeyPatch, secret: str = SECRET) -> None:
    import s3fs

    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    settings = {"ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": secret, "ENDPOINT_URL": url}
    settings |= {"DEFAULT_REGION": "us-east-1", "EC2_METADATA_DISABLED": "true", "MAX_ATTEMPTS": 2}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", str(value))
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(in_parts, "RETRIES", 1)


def make_bucket() -> None:
    fs = s3fs_of_now()
    if not fs.exists("bucket"):
        fs.mkdir("bucket")


def s3fs_of_now():
    import s3fs

    return s3fs.S3FileSystem()


@pytest.fixture
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(in_parts, "PART", PART)
    monkeypatch.setattr(objects, "_PART", PART)
    return "s3://bucket/" + re.sub(r"\W+", "-", request.node.name)


def at_root(url: str) -> tuple:
    """The file system, and the path of ``url`` in it."""
    return Objects(url).at_root()


def save(url: str, *steps: int, store: Objects | None = None, numbers: int = 10) -> list:
    """Save each of ``steps`` in turn; return what each failed of, or None."""
    with KeptSaves(store or url) as saves:
        uploads = [saves.save({"x": torch.full((numbers,), float(n))}, n) for n in steps]
        failed = [upload.exception() for upload in uploads]
        saves.latest = None
    return failed


def is_there(url: str, step: int, numbers: int = 10) -> bool:
    state = {"x": torch.zeros(numbers)}
    resume(state, url, step)
    return bool((state["x"] == step).all())


def unfinished(url: str) -> list:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    uploads = s3fs_of_now().list_multipart_uploads(bucket)
    return [upload for upload in uploads if upload["Key"].startswith(prefix)]


def test_of_two_jobs_at_one_step_one_commits(proxy: Proxy, url: str) -> None:
    """The newcomer; and whoever it is, a name is given once."""
    with KeptSaves(url) as one, KeptSaves(url) as other:
        failed = one.save({"x": torch.full((10,), 4.0)}, 4).exception()
        other.save({"x": torch.full((10,), 4.0)}, 4).result()
        one.latest = None
        assert "another job has taken" in str(failed)
        with pytest.raises(FileExistsError, match="another writer was first"):
            other.store.commit(4, f"{url}/step4.0000beef", {})
    assert is_there(url, 4)


LOST_ANSWER = ("        if fs.cat_file(path) != data:\n", "        if True:\n")


def test_a_commit_whose_answer_was_lost_is_ours(proxy: Proxy, url: str, tmp_path: Path) -> None:
    lost: set[str] = set()

    def trouble(method: str, path: str) -> str | None:
        if method == "PUT" and path.split("?")[0].endswith(".json") and path not in lost:
            lost.add(path)
            return "lost answer"
        return None

    proxy.trouble = trouble
    assert save(url, 1) == [None] and is_there(url, 1) and lost
    module = edited_module(tmp_path, "checkpoint.stores.objects", *LOST_ANSWER)
    store = module.Objects(f"{url}-edited")
    assert "another writer" in str(save("", 1, store=store)), "the test is blind"


@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_a_server_that_has_a_bad_moment_now_and_then(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    """Each request that writes is answered with an error once: the save does not notice."""
    moments = itertools.cycle(["slow down", "internal error", "unavailable", "lost answer"])
    if client == "s3fs":
        monkeypatch.setattr(objects, "SCHEMES", ())
    seen: set[tuple[str, str]] = set()

    def trouble(method: str, path: str) -> str | None:
        first = method in ("PUT", "POST") and (method, path) not in seen
        seen.add((method, path))
        return next(moments) if first else None

    proxy.trouble = trouble
    assert save(url, 1, numbers=BIG) == [None] and is_there(url, 1, BIG) and len(seen) >= 4


def test_an_error_that_stays_fails_one_save(proxy: Proxy, url: str) -> None:
    """It is named, nothing of that save is published, and the next one is taken."""
    errors = ["denied", "expired", "no upload"]

    def trouble(method: str, path: str) -> str | None:
        step = re.search(r"/step(\d)\.\w{8}/__", path)
        return errors[int(step[1])] if step and int(step[1]) < len(errors) else None

    proxy.trouble = trouble
    *failed, taken = save(url, *range(len(errors) + 1))
    assert all(ERRORS[e][1] in str(f) for e, f in zip(errors, failed, strict=True)), failed
    assert taken is None and steps_in(url) == [3] and is_there(url, 3)
    fs, root = at_root(url)
    assert not fs.glob(f"{root}/step[012].*/*") and not unfinished(url)


KILLED = """
import torch
from overlap_recipes.checkpoint import Saves
from overlap_recipes.checkpoint.kept import Checkpoint
from overlap_recipes.checkpoint.stores import in_parts, objects
in_parts.PART = {part}
store = objects.Objects({url!r})
store.open()
with Saves("cpu") as saves:
    saves.save({{"x": torch.full(({numbers},), 2.0)}}, Checkpoint(store, 2, 3, 0))
"""


def test_a_kill_in_an_upload_leaves_what_only_the_rule_removes(proxy: Proxy, url: str) -> None:
    assert save(url, 1) == [None]
    proxy.trouble = lambda method, path: "hold" if "partNumber=2" in path else None
    code = KILLED.format(part=PART, url=url, numbers=BIG)
    job = subprocess.Popen([sys.executable, "-c", code], env=with_library())
    try:
        assert proxy.held.wait(60), "the upload has not come to its second part"
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    proxy.trouble = lambda method, path: None
    assert steps_in(url) == [1] and is_there(url, 1)
    assert len(unfinished(url)) == 1, "parts that no listing shows"
    assert save(url, 2, numbers=BIG) == [None] and is_there(url, 2, BIG)

    block = re.search(r"code-block:: json\n#\n((?:#     .*\n)+)", PAGE.read_text()).group(1)
    rules = json.loads(re.sub(r"^# ", "", block, flags=re.MULTILINE))
    fs = s3fs_of_now()
    call = "put_bucket_lifecycle_configuration"
    fs.call_s3(call, Bucket="bucket", LifecycleConfiguration=rules)
    assert (
        fs.call_s3("get_bucket_lifecycle_configuration", Bucket="bucket")["Rules"] == rules["Rules"]
    )


def test_credentials_stand_in_the_environment_alone(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="environment") as refused:
        Objects(f"s3://{KEY}:{SECRET}@bucket/run")
    assert SECRET not in str(refused.value)
    as_s3(proxy.url, monkeypatch, secret="not-" + SECRET)
    with pytest.raises(RuntimeError, match="rank 0: Permission") as refused:
        save(url, 1)
    assert SECRET not in str(refused.value)


def test_a_store_that_takes_two_commits_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rclone(tmp_path) as end_point:
        as_s3(end_point, monkeypatch)
        make_bucket()
        with pytest.raises(RuntimeError, match="ignores If-None-Match"):
            save(url, 1)


def test_a_listing_that_fails_is_no_empty_store(proxy: Proxy, url: str) -> None:
    """Or a restarted job begins anew, without a word."""
    assert save(url, 1) == [None]
    proxy.trouble = lambda method, path: "denied" if "list-type=2" in path else None
    with pytest.raises(BaseError, match="AccessDenied"):
        steps_in(url)
    proxy.trouble = lambda method, path: None
    assert steps_in(url) == [1]
    assert steps_in(f"{url}-empty") == []


def test_a_name_may_have_the_signs_of_a_pattern(proxy: Proxy, url: str) -> None:
    url = f"{url}[lr=1e-3]*"
    assert save(url, 1, 2) == [None, None]
    assert steps_in(url) == [2, 1] and is_there(url, 2)


@pytest.mark.parametrize("failing", ["steps", "remove"])
def test_what_fails_behind_a_commit_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    url = f"file://{tmp_path}/store"

    def commit_and_fail(*arguments: object) -> None:
        commit(*arguments)
        monkeypatch.setattr(Objects, failing, trouble)

    def trouble(*arguments: object) -> None:
        raise KeyError("whatever a store raises")

    with KeptSaves(url, keep_last=1) as saves:
        saves.save({"x": torch.ones(3)}, 1).result()
        commit = Objects.commit
        monkeypatch.setattr(Objects, "commit", commit_and_fail)
        saves.save({"x": torch.ones(3)}, 2).result()
    assert "cannot be deleted" in caplog.text and "whatever a store raises" in caplog.text
    monkeypatch.undo()
    assert steps_in(url) == [2, 1]


def test_parts_go_up_together_and_come_back_together_each_byte_once(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of each kind is held until the second is there."""
    seen: list[tuple[str, str]] = []
    second = {"PUT": threading.Event(), "GET": threading.Event()}

    def trouble(method: str, path: str) -> str | None:
        if method in second and "__0_0.distcp" in path:
            seen.append((method, path))
            if [some for some, _ in seen].count(method) > 1:
                second[method].set()
            elif not second[method].wait(30):
                return "refuse"
        return None

    asked: list[int] = []
    cat_file = in_parts.InParts.cat_file

    def counted(fs, path: str, start: int | None = None, end: int | None = None):
        if "__0_0.distcp" in path:
            asked.append(end - start)
        return cat_file(fs, path, start, end)

    proxy.trouble = trouble
    assert save(url, 1, numbers=BIG) == [None]
    monkeypatch.setattr(in_parts.InParts, "cat_file", counted)
    assert is_there(url, 1, BIG)
    assert 4 * BIG <= sum(asked) <= 1.05 * 4 * BIG and len(asked) == 2, asked
