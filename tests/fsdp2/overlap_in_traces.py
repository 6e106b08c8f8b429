"""What a trace of four steps says of a schedule's gathers beside products.

**Overlap** is judged from an exported trace of four steps of a schedule. The first warms up: behind
it the host is ahead, and no rank waits for another that started late. The third is judged. The
second and the fourth are *serial*: the same schedule, but each gather and each reduce-scatter waits
for all products queued so far, and those that follow wait for it. Kernels and copies belong to what
launched them: a product to its operator, a gather or a reduce-scatter to the range around the call
that queued it, whatever the kernels are called.

What is judged follows from the schedules, not from a measurement:

* A product takes longer than a gather, so a schedule can hide every gather that it queues while
  products are still to come. How many these are is in ``watched_schedules.Schedule``. More than
  half of that must be hidden: who hides nothing in forward has lost at least half. The rest is room
  for what else a gather's time contains: its wait for the other rank, and what runs between
  products.
* Overlap pays if the judged step is shorter than the serial ones, by more than their waits cost:
  then the communication that it hides, gathers and reduce-scatters, takes longer one after the
  other than the products lose beside it. The serial step is the mean of the judged one's two
  neighbours, in which a drift of the clocks that is linear cancels; a step lasts from the end of
  the one before to its own, on the device. The median of the runs is judged. In serial steps
  nothing may be hidden: a run whose reference overlaps as well is at fault.
"""

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
GATHER, REDUCE = "gather of a parameter or unit", "reduce-scatter of a parameter or unit"
WARM_UP, SERIAL, JUDGED = "a step to warm up", "a serial step", "the judged step"
STEPS = (WARM_UP, SERIAL, JUDGED, SERIAL)
NOTHING = 0.01  # of the communication's time: what counts as not hidden in a serial step
WAITS_US = 10.0  # more than the two waits around a collective cost a serial step
Span = tuple[float, float]  # µs


def union(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def length(spans: list[Span]) -> float:
    return sum(stop - start for start, stop in spans)


def common(a: list[Span], b: list[Span]) -> float:
    return sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)


@dataclass(frozen=True)
class Overlap:
    """A trace's judged step beside its serial ones; times in µs."""

    gathers: int  # calls, in the judged step
    reductions: int
    gathers_us: float
    hidden_us: float  # of the gathers' time
    gather_streams: tuple[int, ...]
    product_streams: tuple[int, ...]
    step_us: float
    serial_step_us: float
    serial_communication_us: float  # gathers and reduce-scatters of the serial steps
    serial_hidden_us: float

    def faults(self, least_hidden: float) -> list[str]:
        """What is wrong with the overlap; nothing, if it is as the pages say."""
        found = []
        if not self.gathers_us:
            return ["no gather was found"]
        if len(self.product_streams) != 1 or set(self.gather_streams) & set(self.product_streams):
            found.append(f"gathers on {self.gather_streams}, products on {self.product_streams}")
        if (share := self.hidden_us / self.gathers_us) <= least_hidden:
            found.append(f"{share:.2f} of the gathers' time is hidden")
        if self.serial_hidden_us > NOTHING * self.serial_communication_us:
            found.append(f"serial steps overlap for {self.serial_hidden_us:.0f} µs")
        return found


def gain_us(runs: list[Overlap]) -> float:
    """How much shorter the step is than a serial one: what is hidden, less what that costs.

    The waits that make a step serial are not counted.
    """
    return median(
        run.serial_step_us - WAITS_US * (run.gathers + run.reductions) - run.step_us for run in runs
    )


def spans(events: list[dict]) -> list[Span]:
    return [(event["ts"], event["ts"] + event["dur"]) for event in events]


def read_overlap(events: list[dict]) -> Overlap:
    """Judge the events of a Chrome trace of ``STEPS`` that ``torch.profiler`` exported."""
    complete = [event for event in events if event.get("ph") == "X"]
    ranges: dict[str, list[tuple[object, Span]]] = {GATHER: [], REDUCE: [], "product": []}
    launches: dict[object, tuple[object, float]] = {}
    steps: list[tuple[Span, str]] = []
    for event in complete:
        (span,) = spans([event])
        kind, name = event.get("cat"), event["name"]
        if kind == "user_annotation" and name in STEPS:
            steps.append((span, name))
        elif kind == "user_annotation" and name in (GATHER, REDUCE):
            ranges[name].append((event["tid"], span))
        elif kind == "cpu_op" and name in PRODUCTS:
            ranges["product"].append((event["tid"], span))
        elif kind in ("cuda_runtime", "cuda_driver"):
            launches[event["args"]["correlation"]] = (event["tid"], event["ts"])
    steps.sort()
    assert tuple(name for _, name in steps) == STEPS, f"a trace of {steps}"

    def launch(event: dict) -> tuple[object, float] | None:
        return launches.get(event.get("args", {}).get("correlation"))

    on_device = [e for e in complete if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]

    def ran(step: Span) -> list[dict]:
        """What a step queued on the device."""
        return [e for e in on_device if (at := launch(e)) and step[0] <= at[1] < step[1]]

    def launched(step: Span, *what: str) -> list[dict]:
        """What ran on the device because of ``what`` in a step."""
        callers = [caller for name in what for caller in ranges[name]]

        def because(tid: object, at: float) -> bool:
            return any(t == tid and start <= at < stop for t, (start, stop) in callers)

        return [event for event in ran(step) if because(*launch(event))]

    def calls(step: Span, what: str) -> int:
        return sum(step[0] <= start < step[1] for _, (start, _) in ranges[what])

    ends = [max((stop for _, stop in spans(ran(step))), default=0.0) for step, _ in steps]
    _, before, judged, behind = (step for step, _ in steps)
    lasted = [end - start for start, end in pairwise(ends)]  # of all but the first
    gathers, products = launched(judged, GATHER), launched(judged, "product")
    serial = [
        (union(spans(launched(s, GATHER, REDUCE))), union(spans(launched(s, "product"))))
        for s in (before, behind)
    ]
    return Overlap(
        gathers=calls(judged, GATHER),
        reductions=calls(judged, REDUCE),
        gathers_us=length(union(spans(gathers))),
        hidden_us=common(union(spans(gathers)), union(spans(products))),
        gather_streams=tuple(sorted({event["args"]["stream"] for event in gathers})),
        product_streams=tuple(sorted({event["args"]["stream"] for event in products})),
        step_us=lasted[1],
        serial_step_us=(lasted[0] + lasted[2]) / 2,
        serial_communication_us=sum(length(communication) for communication, _ in serial),
        serial_hidden_us=sum(common(*of_step) for of_step in serial),
    )
