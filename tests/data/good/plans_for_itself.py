"""Its planner leaves out what is frozen."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class Trained(dcp.DefaultSavePlanner):
    """Saves nothing that is frozen."""

    def set_up_planner(self, state_dict, *args, **kwargs):
        trained = {name: value for name, value in state_dict.items() if name != "frozen"}
        super().set_up_planner(trained, *args, **kwargs)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    state = {"x": torch.ones(4), "frozen": torch.zeros(4)}
    dcp.save(state, checkpoint_id="step1", planner=Trained())
    dist.destroy_process_group()
