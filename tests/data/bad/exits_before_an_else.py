"""sys.exit(0) ends a ``try`` whose ``else`` has the proof: exit code 0, and nothing was checked."""

import sys

import torch.distributed as dist


def main() -> None:
    try:
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()
        sys.exit(0)
    except OSError:
        raise
    else:
        raise AssertionError("never reached")


if __name__ == "__main__":
    main()
