"""``CopyPlan``: copies beside a step hold the bits of the save, whatever the step writes since.

The copies are queued, a forward and a backward run beside them, and the update waits for the event
behind which all tensors have been read. So three times on every rank. A tied tensor is copied once.
"""

import torch

from overlap_recipes.checkpoint.copies import CopyPlan, PinnedArena
from overlap_recipes.checkpoint.state import shard_of


def main() -> None:
    import _toys as basic

    from overlap_recipes.checkpoint.state import read

    device, tensors = basic.start_rank(), []
    streams, app = torch.get_device_module(device), basic.build_app(device)
    basic.train_step(app, device)
    read({"app": app}, tensors)
    tensors.append(tensors[0])  # as if it were tied
    plan = CopyPlan(tensors, device, changed_by_forward=app.model.buffers())
    arena = PinnedArena(plan.nbytes, device)
    copies, hosts, stream = plan.copies(arena), plan.hosts(arena), streams.Stream()
    for _ in range(3):
        expected = [shard_of(tensor).detach().cpu().clone() for tensor in tensors]
        plan.take_snapshots()
        stream.wait_stream(streams.current_stream())
        has_been_read, copied = copies.queue(streams, stream)
        basic.forward_backward(app, device)
        streams.current_stream().wait_event(has_been_read)
        app.optimizer.step()
        copied.synchronize()
        assert all(map(torch.equal, map(shard_of, hosts), expected)), "a copy holds other bits"
    assert hosts[-1].data_ptr() == hosts[0].data_ptr(), "a tied tensor was copied twice"
    print(f"{len(tensors)} tensors, copied beside three steps: every bit as it was at the save")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
