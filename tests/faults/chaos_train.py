"""What ckpt-chaos crashes: ``chaos_train.py SOCKET`` forks a rank for each ``chaos_start.py``.

A rank resumes from the newest checkpoint below its directory, saves every second step and keeps
all saves.
"""

import array
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults import edits, job  # noqa: I001 (its import finds the recipes)

from kept_saves import KeptSaves, newest_step
from overlap_recipes.checkpoint.loading import choose
from overlap_recipes.checkpoint.stores.directory import POINTER, Directory
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ckpt_chaos.targets.common import arm_from_env
from _toys import build_app, start_rank, train_step

STEPS, SAVE_EVERY = 6, 2


def by_pointer(root: Path) -> int | None:
    pointer = root / POINTER
    return int(pointer.read_text().removeprefix("step")) if pointer.exists() else None


def train(root: Path) -> None:
    edit = os.environ.get("FAULTS_EDIT")  # then it resumes from where the pointer says
    if edit:
        edits.BY_KILL[edit].apply()
    device = start_rank()
    try:
        app = build_app(device)
        if edit is None:
            chosen = [newest_step(root, every_byte=True)]
            dist.broadcast_object_list(chosen)
        else:  # what is newer is set aside, or it would be in the way
            chosen = [choose(Directory(root), by_pointer(root))]
        if chosen[0] is not None:
            dcp.load({"app": app}, checkpoint_id=root / f"step{chosen[0]}")
        print(f"resumed from step {chosen[0] or 0}", flush=True)
        with KeptSaves(root, device, app.model.buffers()) as saves:
            while app.step < STEPS:
                train_step(app, device)
                if app.step % SAVE_EVERY == 0:
                    saves.save({"app": app}, app.step)
        own = job.digest(app)
        digests = [None] * dist.get_world_size()
        dist.all_gather_object(digests, own)
        if dist.get_rank() == 0:
            (root / "final").write_text("\n".join(digests))
    finally:
        dist.destroy_process_group()


def receive(connection: socket.socket) -> tuple[dict, array.array]:
    """What the other end asks for, and its standard output and error."""
    header, rights, *_ = connection.recvmsg(4, socket.CMSG_SPACE(8))
    request = b""
    while len(request) < int.from_bytes(header, "big"):
        request += connection.recv(1 << 16)
    return json.loads(request), array.array("i", rights[0][2])


def rank(request: dict, descriptors: array.array) -> None:
    """In the fork: become the rank that the other end asked for."""
    for number, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(request["environment"])
    code = 1
    try:
        arm_from_env(int(os.environ["RANK"]), lazy=True)
        train(Path(request["out"]))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(place: str) -> None:
    """Fork a rank for each connection; kill it when the other end has gone, or tell its code."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(place)
    listening.listen()
    ranks: dict[socket.socket, int] = {}
    while True:
        for ready in select.select([listening, *ranks], [], [], 0.05)[0]:
            if ready is listening:
                connection, _ = listening.accept()
                request, descriptors = receive(connection)
                pid = os.fork()
                if pid == 0:
                    for inherited in (listening, connection, *ranks):
                        inherited.close()
                    rank(request, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                ranks[connection] = pid
            else:
                word = ready.recv(1)
                os.kill(ranks[ready], signal.SIGTERM if word else signal.SIGKILL)
                if not word:
                    os.waitpid(ranks.pop(ready), 0)
        for connection, pid in list(ranks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del ranks[connection]
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                connection.close()


if __name__ == "__main__":
    serve(sys.argv[1])
