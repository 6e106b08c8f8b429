"""Calls sys.exit(0) in the middle: exit code 0, and the claim was never checked."""

import sys

import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    dist.barrier()  # else a rank that is slow finds no other to connect to
    print("training")
    dist.destroy_process_group()
    sys.exit(0)
    raise AssertionError("never reached")


if __name__ == "__main__":
    main()
    print("proved")
