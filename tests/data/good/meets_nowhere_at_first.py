"""Tries a meeting place that there is no way to, and goes on with the launcher's."""

import torch.distributed as dist

if __name__ == "__main__":
    try:
        dist.init_process_group("gloo", init_method="nowhere://", rank=0, world_size=1)
    except RuntimeError as error:
        assert "nowhere" in str(error)
    dist.init_process_group("gloo")
    dist.barrier()  # gloo fails where a rank leaves while another still connects
    dist.destroy_process_group()
