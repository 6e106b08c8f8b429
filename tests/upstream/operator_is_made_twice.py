"""Two threads that first use an operator under a mode make one each, and torch keeps a freed one.

``torch.ops`` holds the last, the dispatcher a bare pointer to the other, whose next use ends the
process by SIGSEGV; up to 2.12 the first thread fails.

Avoided by harness/rankproof/streams/operators.py.
"""

import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        operators.append(operator)
        return operator(*args, **kwargs or {})


def use():
    with Mode():
        torch.binomial(ones, ones)


def init_beside_second(packet, name, *others):
    plain_init(packet, name, *others)
    if name == "aten::binomial" and second.ident is None:
        second.start()
        second.join(timeout=60)


operators, ones, packets = [], torch.ones(1), torch._ops.OpOverloadPacket
first, second = threading.Thread(target=use), threading.Thread(target=use)
plain_init, packets.__init__ = packets.__init__, init_beside_second
first.start(), first.join(), use()
print("fixed" if operators[-1] is torch.ops.aten.binomial.default else "holds")
