"""Train many programs under stock FSDP2 and in place, and compare every bit.

One process a rank runs them all; see ``tests/fsdp2/test_sharding_in_place.py``. The modules beside
this one, ``in_place_*.py``, have the models, the loops, the programs that go through both ways, and
what else is tried: troubles, and several streams.
"""

import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "proofs")]

from in_place_accumulation import TROUBLES as OF_ACCUMULATION  # noqa: E402
from in_place_models import DEVICE, POLICIES, SLOTS, state  # noqa: E402
from in_place_programs import PROGRAMS, Program  # noqa: E402
from in_place_streams import ON_STREAMS  # noqa: E402
from in_place_troubles import TROUBLES  # noqa: E402

from overlap_recipes.fsdp2 import in_place_gather, in_place_reduce  # noqa: E402

FLOAT32 = "fp32"
IN_EVERY_POLICY = ("plain", "accumulation", "lora", "sum_not_mean")


def run(program: Program, policy, ours: bool) -> list:
    model = program.build(policy)
    if ours:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            copies = in_place_gather.gather_in_place(model, slots=SLOTS)
            pushed = in_place_reduce.reduce_in_place(model)
        model.copies = copies
        if program.compiled_sums and pushed is not None:
            pushed.average = torch.compile(in_place_reduce.average, dynamic=True)
        reasons = [str(w.message) for w in warned if "communicates as before" in str(w.message)]
        assert (copies is None) == bool(reasons), "a fall back must say why"
    torch.manual_seed(1)
    model.shards = list(model.parameters())  # as an optimizer holds them
    optimizer = program.optimizer([p for p in model.parameters() if p.requires_grad])
    found = list(program.loop(model, optimizer))
    if ours and copies is not None:
        assert copies.gathers, "nothing was gathered by copies"
        if pushed is not None:
            assert pushed.calls, "nothing was pushed"
            # what a backward that raised has begun is ended by reset_iter_state, which 2.11 lacks
            assert not pushed.waiting or not hasattr(model, "reset_iter_state")
    return [*found, *state(model).values(), len(found)]


def compare(name: str, policy: str) -> str | None:
    expected, found = (run(PROGRAMS[name], POLICIES[policy], way) for way in (False, True))
    if len(expected) != len(found):
        return f"{len(found)} values instead of {len(expected)}"
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        same = torch.equal(a, b) if torch.is_tensor(a) else a == b
        if not same or (torch.is_tensor(a) and a.isnan().any()):
            return f"value {number} of {len(expected)} differs: {a} {b}"[:600]
    return None


def policies_of(name: str, few: bool) -> tuple[str, ...]:
    """Those of a program; with ``few``, float32 sums stand for all where a loop knows of none."""
    policies = PROGRAMS[name].policies if name in PROGRAMS else (FLOAT32,)
    if few and FLOAT32 in policies and name not in IN_EVERY_POLICY:
        return (FLOAT32,)
    return policies


def main() -> None:
    if DEVICE.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.use_deterministic_algorithms(True)
    dist.init_process_group()
    troubles = {trouble.__name__: trouble for trouble in TROUBLES + OF_ACCUMULATION}
    known = [*PROGRAMS, *troubles]
    troubles |= ON_STREAMS
    wanted = sys.argv[1].split(",") if len(sys.argv) > 1 else known
    few = False
    if wanted == ["half"]:
        wanted = known[int(sys.argv[2]) :: 2]
        few = "few_policies" in sys.argv
    failures = 0
    runs = [(name, policy) for name in wanted for policy in policies_of(name, few)]
    for name, policy in runs:
        try:
            wrong = compare(name, policy) if name in PROGRAMS else troubles[name]()
        except Exception:
            wrong = traceback.format_exc(limit=-8)
        failures += wrong is not None
        if dist.get_rank() == 0 or wrong:
            print(f"{name}, reduce in {policy}: {wrong or 'every bit'}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
    assert not failures, f"{failures} programs differ"


if __name__ == "__main__":
    main()
