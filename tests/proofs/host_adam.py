"""``HostUpdates``: masters and weights of layers have the bits of ``torch.optim.AdamW``."""

import torch
import torch.distributed as dist
from _training import STEPS, Model, loss_of

from overlap_recipes.offload import adam_in_pieces as pieces
from overlap_recipes.offload.host_adam import HostUpdates
from overlap_recipes.offload.streamed_model import StreamedModel
from overlap_recipes.ranks import start_rank


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        model = Model().bfloat16()
        streamed = StreamedModel(model, model.encoder.layers, device)
        trained = list(model.encoder.layers.parameters())
        masters = [torch.nn.Parameter(p.detach().float()) for p in trained]
        optimizer = torch.optim.AdamW(masters, fused=True, **pieces.SETTINGS)
        updates = HostUpdates(streamed, dict.fromkeys(trained, 0))
        for step in range(STEPS):
            loss_of(model, step, device).backward()  # loads a layer when it is updated
            for master, parameter in zip(masters, trained, strict=True):
                master.grad = parameter.grad.float()
            optimizer.step()
            updates.start(updates.announce(range(len(streamed.layers)), [pieces.SETTINGS]))
            model.zero_grad()
        streamed.wait()
        for parameter, master in zip(trained, masters, strict=True):
            assert torch.equal(updates.state[parameter]["master"], master)
            assert torch.equal(parameter, master.bfloat16())
        print(f"{len(trained)} tensors have the bits of torch.optim.AdamW")
        updates.close()
        streamed.close()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
