"""Sharded gradients go home on another stream than the one that their memory comes from.

After pytorch/pytorch#180665 (HSDP with CPUOffloadPolicy): the reduced gradient is allocated on the
stream of the reduce-scatter, its copy to the host runs on that of the all-reduce. Once no name
holds it, the next reduce-scatter may get its memory. ``--cured`` keeps it until the copy has run.
"""

import sys

import torch

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
streams = torch.get_device_module(DEVICE)
CURED = "--cured" in sys.argv


def main() -> None:
    reducing = streams.Stream()
    going_home = streams.Stream()
    gradients = [torch.full((1024,), float(layer), device=DEVICE) for layer in range(4)]
    homes = [torch.zeros(1024) for _ in gradients]
    kept = None
    for gradient, home in zip(gradients, homes, strict=True):
        reducing.wait_stream(streams.current_stream())
        with streams.stream(reducing):
            if kept is not None:
                reducing.wait_event(kept[1])  # the copy before this one has run
                kept = None
            reduced = torch.empty(1024, device=DEVICE)
            torch.mul(gradient, 0.5, out=reduced)
        going_home.wait_stream(reducing)
        with streams.stream(going_home):
            home.copy_(reduced, non_blocking=True)
            copied = streams.Event()
            copied.record()
        if CURED:
            kept = reduced, copied
        del reduced
    streams.synchronize()
    print([home.mean().item() for home in homes])


if __name__ == "__main__":
    main()
