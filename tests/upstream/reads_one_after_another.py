"""``dcp.load`` reads and unpickles tensor after tensor, on the thread that calls it.

Avoided by recipes_source/checkpoint/load.py.
"""

import tempfile
import threading

import torch
import torch.distributed.checkpoint as dcp

threads = []
plain_load = torch.load


def noted_load(*arguments, **options):
    threads.append(threading.get_ident())
    return plain_load(*arguments, **options)


with tempfile.TemporaryDirectory() as folder:
    state = {f"tensor{number}": torch.zeros(8) for number in range(4)}
    dcp.save(state, checkpoint_id=folder)
    torch.load = noted_load
    dcp.load(state, checkpoint_id=folder)
serial = threads == [threading.get_ident()] * len(state)
print("holds" if serial else "fixed")
