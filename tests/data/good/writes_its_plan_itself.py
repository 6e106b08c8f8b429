import os

import torch
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    directory = f"rank{os.environ['RANK']}"
    state = {"weight": torch.arange(8.0)}
    planner, writer = dcp.DefaultSavePlanner(), dcp.FileSystemWriter(directory)
    planner.set_up_planner(state, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])
