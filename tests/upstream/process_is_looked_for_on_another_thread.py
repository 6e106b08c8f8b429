"""By source: two saves in a row may each start the daemon of the ``PROCESS`` checkpointer.

Avoided by recipes_source/checkpoint/saves_beside_training.py.
"""

import inspect

from torch.distributed.checkpoint import _async_process_executor as executor

caller = inspect.getsource(executor._ProcessBasedAsyncCheckpointExecutor.execute_save)
worker = inspect.getsource(executor._ProcessBasedAsyncCheckpointExecutor._execute_save_impl)
asks, sets = "_CHECKPOINT_PROCESS" in caller, "_CHECKPOINT_PROCESS =" in worker
print("holds" if asks and sets else "fixed", "by source")
