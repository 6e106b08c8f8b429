"""Stream order without a GPU: find accesses that no event, wait or synchronisation orders.

On a CPU, ``torch.cpu``'s streams and events do nothing: a program that forgot to wait for an event
computes the same bits as one that did not. :func:`recording` puts a recording device module in
their place and a ``TorchDispatchMode`` that sees every operator, and keeps *happens-before* by
vector clocks, the way a race detector does. Two accesses to the same bytes, one of them a write,
of which neither happens before the other, are a :class:`Conflict`. No timing is involved: an
order that is missing is found in every run, whether or not the bits came out right.

The model, which is that of a CUDA program:

* Every stream is a lane. An operator runs on the current stream of its thread; it starts after
  all that was launched on its lane, and after all that its thread knew to be complete at launch.
* ``event.record``, ``stream.wait_event``, ``wait_stream`` order lanes. ``event.synchronize``,
  ``stream.synchronize``, ``synchronize()``, and the recipe's own ``.item()`` and ``torch.equal``
  let the host thread know. Where torch itself calls ``.item()`` (Adam's step count, a mesh's
  coordinates), it reads a tensor that is in host memory on any machine, and waits for nothing.
* The main thread's current stream is the default stream. **Another thread has a lane of its own,
  in which its operators are complete when they return**, until it enters a stream: on a machine
  with a GPU such threads (staging, upload) work in host memory or on a stream of their own, and
  never in order with the default stream. ``current_stream()`` gives that lane, so a thread can
  make itself wait for an event. ``DefaultStager``'s thread, which has a stream of its own only
  where there is an accelerator, is judged here as it behaves there, if the script has one.
* Threads know what their starter, the submitter of their work item, a future, a ``threading.Event``
  or a ``threading.Barrier`` they waited for knew, and who put the item that they get from a
  ``queue.Queue``. ``Queue.join()`` teaches what those knew who called ``task_done()``.
  ``future.done()`` teaches only the recipe's own code; where a library asks, it teaches those who
  wait for the futures that this thread then completes. Locks, conditions and semaphores order
  nothing here: a program that relies on them alone may be blamed wrongly.
* A forked process is not recorded.
* ``os.pwritev`` reads the memory of its buffers as it is by then, whichever tensors lie there.
* *Host memory* is what ``torch.frombuffer`` maps, what is made with ``pin_memory``, what the script
  makes without a ``device`` once a copy that need not wait goes between it and other memory, and
  what is computed from it: see ``places``. An operator that touches host memory runs in its
  thread's own lane and is complete when it returns; a device's tensor in it came by ``.cpu()``,
  which waits for the current stream. ``copy_`` between host memory and other memory is a transfer:
  it is queued on the current stream, and the thread waits for it unless it is ``non_blocking``.
* ``.to(device)`` that copies is complete when it returns, unless it is ``non_blocking``. So is a
  ``copy_`` of the staging code of ``torch.distributed``. Any other ``copy_`` cannot be told from
  one on the device and is queued like an operator.
* What a ``non_blocking`` copy has brought is host memory to Python, ``torch.save`` and NumPy,
  whoever made it: they read it as it is. What else they read they wait for, on the current stream;
  a thread in no stream of its own waits for what was queued on the default stream before it was
  told to. So it does for a blocking copy to the host.
* ``DefaultStager``'s thread, where it copies without ``non_blocking``, waits like that.
* A collective begins after what was launched on the current stream, and runs on a lane of its own
  until its ``Work`` is waited for: then the waiting thread's current stream comes after it. That
  nobody waits is found only if somebody uses its tensors. ``collectives`` says what counts as
  waiting. Collectives that torch issues in C++, or as ``_functional_collectives``, run on the lane
  that launches them.
* ``torch.save``, NumPy, ``Tensor.numpy()`` and ``tolist()`` read their tensors on the calling
  thread.
* What ``torch.randn`` and the like make without a ``device`` is made by the host, as a batch is.
* Memory is given back, with the last reference to it, to the stream that allocated it, and goes to
  that stream's next allocation of its size, as a caching allocator would have it: what other lanes
  still do with it then conflicts, unless a thread has waited for it. Giving it
  back by ``untyped_storage().resize_`` is a write of it on the current lane; what it grows to again
  is other memory. What ``resize_`` keeps of a storage that it moves is read and written on the
  current lane.

Limits that are silent:

* Two mappings of one file (``torch.from_file`` twice, two ``mmap``) are different memory here, and
  so is what another process does with a shared file: races between them are not found. Map a file
  once a process.
* A storage that ``resize_`` shrinks on another lane than it grew on: what the stream that it goes
  back to allocates next is not compared with what that other lane still does with it.

The files, from what is simple to what puts it together:

* ``lanes``: streams, events and threads, and their clocks
* ``accesses``: which bytes an operator touched, and when two accesses conflict
* ``memory``: which storage lies where, and who touched it
* ``recorder``: takes accesses, keeps conflicts
* ``operators``: what an operator reads and writes, and on which lane
* ``places``: whether that is the host's memory or a device's
* ``stagers``: how a ``DefaultStager`` copies
* ``beside_operators``: ``torch.save``, ``numpy()``, system calls and the like
* ``collectives``: what is in flight until it is waited for
* ``threads``: what threads learn from each other
* ``lines``: which line of torch it was
"""

import contextlib
from collections.abc import Iterator

import torch

from rankproof.streams import lanes, stagers
from rankproof.streams.beside_operators import BesideOperators
from rankproof.streams.collectives import Collectives
from rankproof.streams.lanes import RECORDERS
from rankproof.streams.operators import OrderMode, allow_graph_breaks, make_each_operator_once
from rankproof.streams.recorder import Recorder
from rankproof.streams.threads import Handovers


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record stream order in this process until the block's end; enter it on the main thread.

    Raises:
        RuntimeError: there is an accelerator, whose streams are real and are not recorded.
    """
    if torch.accelerator.is_available():
        raise RuntimeError("stream order is recorded on machines without an accelerator only")
    recorder = Recorder()
    RECORDERS.append(recorder)
    with recorder.undo:
        recorder.undo.callback(recorder.end)
        lanes.stand_in(recorder)
        make_each_operator_once(recorder)
        allow_graph_breaks(recorder)
        Handovers(recorder).watch()
        BesideOperators(recorder).watch()
        Collectives(recorder).watch()
        stagers.watch(recorder)
        recorder.undo.enter_context(OrderMode(recorder))
        yield recorder
