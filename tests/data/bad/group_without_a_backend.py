"""Names a backend that there is none of."""

import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("goo")
