"""Jobs under Ray Train, on the CPU of this machine: a head and three nodes of one core each.

ray_train.py [SCENARIO...]    exit status 0 if each has the bits of a job that nobody interrupted

``ray.sh`` makes an environment with Ray and calls it. Leaves nothing.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(HERE)]
os.environ |= {
    "PYTHONPATH": f"{ROOT}:{HERE}",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
}

import ray  # noqa: E402
import ray.train  # noqa: E402
from object_servers import KEY, SECRET, seaweedfs  # noqa: E402
from ray._raylet import GcsClient  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.train import FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from ray.train.torch import TorchTrainer  # noqa: E402

LAST_STEP = 200
NOTICE_S = 20
PREEMPTION = 2  # ray.core.generated.autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION


def loop(config: dict) -> None:
    """What Ray Train runs on each worker: on a thread, where Python handles no signal."""
    from train import train

    os.environ |= config.get("environment", {})
    exit_code = train(config["root"], LAST_STEP, None, ray.train.get_preemption_info)
    if exit_code:
        sys.exit(exit_code)  # returning would be success, for good; this is one of max_failures


# --- the scenarios


def told(config: dict) -> None:
    """``loop``, with its output in a file, and what shall happen to it."""
    rank = ray.train.get_context().get_world_rank()
    output = os.open(f"{config['output']}.{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    Path(f"{config['output']}.{rank}.pid").write_text(str(os.getpid()))
    Path(f"{config['output']}.{rank}.node").write_text(ray.get_runtime_context().get_node_id())
    loop(config)


def as_in_readme(config: dict) -> None:
    """The loop of README as it stands, on Ray's thread."""
    import torch.distributed as dist
    from train import train

    assert dist.is_initialized()
    train(config["root"], LAST_STEP, {signal.SIGTERM: 30.0})


class Bench:
    """A cluster, and a folder for each scenario."""

    def __init__(self, place: Path) -> None:
        self.place = place
        few = {"object_store_memory": 100 << 20, "include_dashboard": False}
        # The head has no rank: it cannot be drained.
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **few})
        self.few = {"num_cpus": 1, **few}
        self.nodes = [self.cluster.add_node(**self.few) for _ in range(3)]  # one to spare
        ray.init(address=self.cluster.address, logging_level="warning", log_to_driver=False)

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()

    def fit(self, name: str, function=told, workers: int = 2, failures: int = 1, **config) -> str:
        """Run a job to its end; returns its error, or nothing."""
        folder = self.place / name
        folder.mkdir(exist_ok=True)
        environment = {"STALLED": str(folder / "stalled"), **config.pop("environment", {})}
        config = {
            "root": str(folder / "checkpoints"),
            "output": str(folder / "said"),
            "environment": environment,
            **config,
        }
        trainer = TorchTrainer(
            function,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=workers, placement_strategy="SPREAD"),
            run_config=RunConfig(
                name=f"{name}{time.time_ns()}",
                storage_path=str(folder / "ray"),
                failure_config=FailureConfig(max_failures=failures),
            ),
        )
        try:
            trainer.fit()
        except ray.train.v2.api.exceptions.TrainingFailedError as error:
            return str(error)
        return ""

    def when_on(self, name: str, step: int, then) -> threading.Thread:
        """Call ``then`` once a checkpoint of ``step`` is there."""
        wanted = self.place / name / "checkpoints" / f"step{step}"

        def wait() -> None:
            while not wanted.exists():
                time.sleep(0.1)
            then()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        return thread

    def kill(self, name: str) -> None:
        os.kill(int((self.place / name / "said.1.pid").read_text()), signal.SIGKILL)
        print("rank 1 is killed", time.strftime("%H:%M:%S"))

    def drain(self, name: str) -> None:
        """As a cloud does with a spot machine: a notice, then the node is gone."""
        victim = (self.place / name / "said.1.node").read_text()
        node = next(node for node in self.nodes if node.node_id == victim)
        deadline_ms = int((time.time() + NOTICE_S) * 1000)
        GcsClient(address=self.cluster.address).drain_node(
            victim, PREEMPTION, "a test", deadline_ms
        )
        print(f"rank 1's node is drained, {NOTICE_S} s", time.strftime("%H:%M:%S"))
        time.sleep(NOTICE_S)
        self.cluster.remove_node(node, allow_graceful=False)
        self.nodes.remove(node)
        print("and is gone", time.strftime("%H:%M:%S"))

    def judge(self, name: str) -> bool:
        outputs = sorted(str(file) for file in (self.place / name).glob("said.[0-9]"))
        said = subprocess.run(["sort", *outputs], check=True, capture_output=True, text=True)
        print("".join(f"    {line}\n" for line in said.stdout.splitlines()), end="")
        return not subprocess.run([sys.executable, str(HERE / "judge.py"), *outputs]).returncode


def thread(bench: Bench) -> bool:
    error = bench.fit("thread", as_in_readme, failures=0)
    (said,) = {line for line in error.splitlines() if line.startswith("ValueError")} or {"nothing"}
    print(f"    {said}")
    return "Python handles signals on the main thread alone" in said


def kill(bench: Bench) -> bool:
    bench.when_on("kill", 40, lambda: bench.kill("kill"))
    error = bench.fit("kill", environment={"PACE": "0.1"})
    return not error and bench.judge("kill")


def fewer(bench: Bench) -> bool:
    """No failure is allowed; then the job is started again, on one worker."""
    bench.when_on("fewer", 40, lambda: bench.kill("fewer"))
    error = bench.fit("fewer", failures=0, environment={"PACE": "0.1"})
    print(f"    {error.splitlines()[0]}")
    return not bench.fit("fewer", workers=1) and bench.judge("fewer")


def drain(bench: Bench) -> bool:
    draining = bench.when_on("drain", 40, lambda: bench.drain("drain"))
    error = bench.fit("drain", environment={"PACE": "0.2"})
    draining.join()
    bench.nodes.append(bench.cluster.add_node(**bench.few))
    return not error and bench.judge("drain")


def url(bench: Bench) -> bool:
    """A root in a store; a worker is killed."""
    store = bench.place / "store"
    store.mkdir()
    with seaweedfs(store) as address:
        environment = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": address,
            "AWS_DEFAULT_REGION": "us-east-1",
            "PACE": "0.1",
        }
        subprocess.run(
            [sys.executable, "-c", "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"],
            env={**os.environ, **environment},
            check=True,
        )

        def kill_later() -> None:
            pid = bench.place / "url" / "said.1.pid"
            while not pid.exists():
                time.sleep(0.1)
            while "begins" not in (bench.place / "url" / "said.1").read_text():
                time.sleep(0.1)
            time.sleep(8)
            bench.kill("url")

        threading.Thread(target=kill_later, daemon=True).start()
        error = bench.fit("url", root="s3://bucket/run", environment=environment)
    return not error and bench.judge("url")


SCENARIOS = {"thread": thread, "kill": kill, "fewer": fewer, "drain": drain, "url": url}


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    bad = []
    place = Path(tempfile.mkdtemp(prefix="ray-train."))
    (place / "known").mkdir()
    os.environ["KNOWN"] = str(place / "known")
    bench = Bench(place)
    try:
        print(f"Ray {ray.__version__}, {len(bench.nodes)} nodes")
        for name in sys.argv[1:] or SCENARIOS:
            print(f"=== {name}, {time.strftime('%H:%M:%S')}", flush=True)
            if not SCENARIOS[name](bench):
                bad.append(name)
    finally:
        bench.close()
        shutil.rmtree(place, ignore_errors=True)
    print("not as it should be:", " ".join(bad) or "none")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
