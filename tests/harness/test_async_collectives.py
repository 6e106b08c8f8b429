"""The recorder of stream order: who uses a tensor that a collective still works on."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn.parallel import DistributedDataParallel

from rankproof import streams

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="an accelerator's streams are real"
)


@pytest.fixture
def recorder():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with streams.recording() as recording:
            yield recording
    finally:
        dist.destroy_process_group()


def use(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mul_(2)


def test_a_use_before_wait_names_the_collective_and_both_lines(recorder):
    tensor = torch.ones(8)
    work = dist.all_reduce(tensor, async_op=True)
    use(tensor)
    work.wait()
    (conflict,) = recorder.conflicts
    assert conflict.before_wait
    issued = test_a_use_before_wait_names_the_collective_and_both_lines.__code__.co_firstlineno + 2
    used = use.__code__.co_firstlineno + 1
    text = str(conflict)
    assert f"all_reduce, issued at test_async_collectives.py:{issued}, writes" in text
    assert f"test_async_collectives.py:{used} " in text
    assert recorder.report().used_before_wait == [text]
    assert recorder.report().conflicts == []


def coalesced(tensor: torch.Tensor) -> dist.Work:
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(tensor)
        dist.all_reduce(torch.ones(3))
    return manager


ISSUES = {
    "all_reduce": lambda tensor: dist.all_reduce(tensor, async_op=True),
    "all_gather": lambda tensor: dist.all_gather([torch.empty(8)], tensor, async_op=True),
    "scatter": lambda x: dist.reduce_scatter_tensor(torch.empty(8), x, async_op=True),
    "broadcast": lambda tensor: dist.broadcast(tensor, src=0, async_op=True),
    "coalesced": coalesced,
}


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("issue", ISSUES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_each_collective_holds_its_tensors_until_wait(recorder, issue, waits):
    tensor = torch.ones(8)
    work = ISSUES[issue](tensor)
    if waits:
        work.wait()
    use(tensor)
    assert [conflict.before_wait for conflict in recorder.conflicts] == [True] * (not waits)
    work.wait()


def test_what_is_gathered_is_not_read_before_wait(recorder):
    gathered = [torch.empty(8)]
    work = dist.all_gather(gathered, torch.ones(8), async_op=True)
    gathered[0].tolist()
    work.wait()
    assert [conflict.later.operator for conflict in recorder.conflicts] == ["tolist"]


@pytest.mark.parametrize("issue", ["all_gather", "broadcast"])
def test_what_is_only_sent_may_be_read(recorder, issue):
    tensor = torch.ones(8)
    work = ISSUES[issue](tensor)
    tensor.sum()
    work.wait()
    assert recorder.conflicts == []


def by_a_thread_that_is_joined(work: dist.Work) -> None:
    thread = threading.Thread(target=work.wait)
    thread.start()
    thread.join()


def by_an_executor(work: dist.Work) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work.wait).result()


WAYS = {
    "future": lambda work: work.get_future().wait(),
    "next": lambda work: work.get_future().then(lambda done: use(done.value()[0])).wait(),
    "collect_all": lambda work: torch.futures.collect_all([work.get_future()]).wait(),
    "asking": lambda work: list(iter(work.is_completed, True)),
    "barrier": lambda work: dist.barrier(),
    "thread": by_a_thread_that_is_joined,
    "executor": by_an_executor,
}


@pytest.mark.parametrize("wait", WAYS.values(), ids=WAYS.keys())
def test_whoever_waits_in_another_way_may_use_it(recorder, wait):
    tensor = torch.ones(8)
    work = dist.all_reduce(tensor, async_op=True)
    wait(work)
    use(tensor)
    assert recorder.conflicts == []


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_waits_for_the_work_of_another(recorder, waits):
    tensor, side, user = torch.ones(8), torch.cpu.Stream(), torch.cpu.Stream()
    side.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(side):
        work = dist.all_reduce(tensor, async_op=True)
    with torch.cpu.stream(user):
        if waits:
            work.wait()
        use(tensor)
    work.wait()
    assert (recorder.conflicts == []) is waits


@pytest.mark.parametrize("views", [True, False])
def test_training_with_ddp_has_no_conflict(recorder, views):
    layers = [torch.nn.Linear(16, 16) for _ in range(3)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), gradient_as_bucket_view=views)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert recorder.count > 0
    assert [str(conflict) for conflict in recorder.conflicts] == []


def train_with_fsdp2(**settings) -> torch.nn.Linear:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    for layer in model:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).sum().backward()
        torch.cpu.synchronize()  # as who reads what comes home must
        optimizer.step()
    return model[0]


def test_training_with_fsdp2_has_no_conflict(recorder):
    train_with_fsdp2()
    assert recorder.count > 0
    assert [str(conflict) for conflict in recorder.conflicts] == []


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("lets_go", [False, True])
def test_hsdps_gradients_race_home_where_they_are_copied_and_let_go_of(
    recorder, monkeypatch, copies, lets_go
):
    """From a CPU to a CPU, torch copies nothing; and FSDP2 holds what is reduced until the end."""
    to, state = torch.Tensor.to, _fsdp_param_group.AllReduceState

    def brought(tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if copies and "non_blocking" in kwargs:
            return torch.zeros(tensor.shape).copy_(tensor, non_blocking=True)
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", brought)
    if lets_go:
        monkeypatch.setattr(_fsdp_param_group, "AllReduceState", lambda _, e: state(None, e))
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    layer = train_with_fsdp2(mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    weight, bias = (p.grad.to_local().untyped_storage() for p in (layer.weight, layer.bias))
    assert (weight.data_ptr() == bias.data_ptr()) is not copies
    said = "; ".join(map(str, recorder.conflicts))
    assert ("memory freed since" in said) is bool(said) is (copies and lets_go)


def test_a_future_that_is_set_carries_what_its_stream_has_queued(recorder):
    tensor, future = torch.ones(8), torch.futures.Future()
    use(tensor)
    future.set_result(None)
    with torch.cpu.stream(torch.cpu.Stream()):
        future.wait()
        use(tensor)
    assert not recorder.conflicts


def test_the_future_of_ddps_own_all_reduce_orders_what_waits_for_it(recorder):
    """As ``_apply_optimizer_in_backward`` does, on a stream of its own."""
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    stepping = torch.cpu.Stream()

    def step_at_once(reducer, bucket):
        summed = reducer._run_allreduce_hook(bucket)
        with torch.cpu.stream(stepping):
            summed.wait()
            use(bucket.buffer())
        torch.cpu.current_stream().wait_stream(stepping)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(model.reducer, step_at_once)
    model(torch.ones(2, 8)).sum().backward()
    assert not recorder.conflicts
