"""With two writing threads, an error of the second is lost: the save succeeds (pytorch#191391).

Avoided by recipes_source/checkpoint/saves_beside_training.py.
"""

import tempfile
import threading

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem


def write_item(*args, write=filesystem._write_item, **options):
    if threading.current_thread() is not threading.main_thread():
        raise OSError(28, "No space left on device")
    return write(*args, **options)


filesystem._write_item = write_item
state = {str(i): torch.ones(1000) for i in range(4)}
with tempfile.TemporaryDirectory() as directory:
    try:
        writer = dcp.FileSystemWriter(directory, thread_count=2)
        dcp.save(state, storage_writer=writer, no_dist=True)
        print("holds")
    except BaseException:
        print("fixed")
