"""Two hosts of network namespaces: the link is cut in a save, a host is lost and comes back.

To be run where namespaces may be made: ``unshare -nm python two_hosts.py DIRECTORY WAY`` as root,
else with ``-Urnm``. ``own``: each host has a disk, and comes back with an empty one; ``shared``:
both have the same. Everything that it makes ends with it.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

SCRIPT = Path(__file__).with_name("two_hosts_train.py")
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
PATIENCE_S = 90
# Else torch 2.13 keeps the address of the first round, and a new host waits for one of this round.
NEW_HOSTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
root, way = Path(sys.argv[1]), sys.argv[2]
jobs: dict[str, subprocess.Popen] = {}


def disk_of(host: str) -> Path:
    return root / (host if way == "own" else "shared")


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


def make_host(host: str) -> None:
    sh(f"ip netns add {host}")
    sh(f"ip -n {host} link set lo up")


def plug(other: str) -> None:
    """Connect ``other`` with the first host."""
    sh(f"ip link add link-a netns a type veth peer name link-{other} netns {other}")
    for host in ("a", other):
        sh(f"ip -n {host} address add {ADDRESSES[host]}/24 dev link-{host}")
        sh(f"ip -n {host} link set link-{host} up")


def start(host: str) -> None:
    settings = f"is_host={int(host == 'a')},last_call_timeout=3,join_timeout=60"
    command = ["nsenter", f"--net=/run/netns/{host}", sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9", "--monitor-interval=0.5"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES['a']}:29400", "--rdzv-id=run"]
    command += [f"--rdzv-conf={settings}", f"--local-addr={ADDRESSES[host]}", str(SCRIPT)]
    with (root / f"{host}.log").open("a") as log:
        jobs[host] = subprocess.Popen(
            [*command, str(disk_of(host)), way],
            env={**os.environ, **NEW_HOSTS, "GLOO_SOCKET_IFNAME": f"link-{host}", "HOST": host},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def kill(host: str) -> None:
    """Everything of that host at once, as when its power goes."""
    agent = psutil.Process(jobs[host].pid)
    for process in (agent, *agent.children(recursive=True)):
        process.kill()
    jobs[host].wait()


def said(host: str, text: str) -> list[str]:
    log = root / f"{host}.log"
    return [x for x in log.read_text().splitlines() if text in x] if log.exists() else []


def until(what: Callable[[], object], why: str) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > PATIENCE_S:
            logs = "\n".join((root / f"{host}.log").read_text()[-3000:] for host in jobs)
            raise SystemExit(f"not within {PATIENCE_S} s: {why}\n{logs}")
        time.sleep(0.1)
    return time.monotonic() - began


def main() -> dict[str, float]:
    sh("mount -t tmpfs none /run")
    make_host("a")
    make_host("b")
    plug("b")
    start("a")
    start("b")
    until(lambda: said("a", "resumed 0 on 2 ranks"), "both have started")
    until(lambda: (disk_of("a") / "step5").exists(), "a first checkpoint")
    until(lambda: any(disk_of("a").glob("*.incomplete")), "a save that is under way")
    sh("ip -n b link set link-b down")
    seconds = {}
    seconds["cut to resumed"] = until(lambda: said("a", "on 1 ranks"), "the first goes on alone")
    kill("b")
    if way == "own":
        shutil.rmtree(disk_of("b"))
    sh(
        "ip -n a link delete link-a"
    )  # the dead host's sockets would still send what is left in them
    sh("ip netns delete b")
    make_host("b")
    plug("b")
    start("b")
    seconds["new host to resumed"] = until(
        lambda: said("b", "on 2 ranks")[1:], "the new host has joined"
    )
    (root / "hurry").touch()
    for host, job in jobs.items():
        until(lambda job=job: job.poll() is not None, f"{host} has ended")
        assert job.returncode == 0, (root / f"{host}.log").read_text()[-3000:]
    return seconds


if __name__ == "__main__":
    try:
        print(json.dumps(main()))
    finally:
        for host, job in jobs.items():
            if job.poll() is None:
                kill(host)
