"""The formulas of the page "Will it hide?", and how they do against what was measured.

    python -m benchmarks.will_it_hide           # write guide/predicted.json
    python -m benchmarks.will_it_hide --check   # exit 1 if it differs, or a claim is off

``_static/will_it_hide.js`` has the same formulas; a test compares them. A prediction takes the
model's shape, the rates that the row's file measured of its link, the device's data sheet and,
where a way adds to a step, the step without it from another row. It takes nothing from the row.
"""

import json
import math
import sys
from pathlib import Path

from benchmarks.result_files import PARAMETERS, Result, files, load

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "guide" / "predicted.json"
TOLERANCE = 0.15
UNITS = 14  # of FSDP, where the model does not say: what one gather is of all
STOCK = {  # parameters; bytes that autograd keeps a token, counted on the meta device
    ("llama-1b", 1): (1_038_682_112, 1.88e6),
    ("llama-1b", 2): (1_235_814_400, 2.27e6),
    ("llama-8b-blocks", 2): (2_879_492_096, 2.57e6),
}
DATA_SHEETS = {  # bf16 FLOP/s without sparsity; bytes/s of memory, host link, peer link, one way
    "NVIDIA A100 80 GB SXM": (312e12, 2.039e12, 32e9, 300e9),
    "NVIDIA H100 SXM": (989e12, 3.35e12, 64e9, 450e9),
    "NVIDIA H200": (989e12, 4.8e12, 64e9, 450e9),
    "NVIDIA B200": (2250e12, 8.0e12, 64e9, 900e9),
    "NVIDIA RTX 4090, PCIe 4": (165e12, 1.008e12, 32e9, 32e9),
    "AMD MI300X": (1307e12, 5.3e12, 64e9, 448e9),
}


def predict(x: dict) -> dict[str, float]:
    """All results for the inputs ``x``: counts, bytes, seconds, bytes/s and FLOP/s."""
    n, ranks, step = x["parameters"], x["ranks"], x["step_s"] or step_from_flops(x)
    shard = n / ranks
    state = shard * x["state_bytes"]
    stage, write = state / x["link"], state / x["storage"]
    behind = max(0.0, stage - step)  # what a copy that nothing delays does not hide
    cost = {
        "blocking": stage + write,
        "at_once": stage if x["reads"] else behind,
        "in_turn": behind,
    }[x["way"]]
    shortest = stage + write  # one save at a time
    interval = max(shortest, math.sqrt(2 * cost * x["failure_s"]))
    gathered, reduced = x["gather_bytes"], x["reduce_bytes"]
    sent = (ranks - 1) / ranks
    gather, reduce = n * gathered * sent / x["peer"], n * reduced * sent / x["peer"]
    ends = (gather + reduce) / x["units"]  # the first gather and the last reduction
    exposed = max(0.0, gather - step / 3) + max(0.0, gather + reduce - step * 2 / 3) + ends
    cast = shard * (4 + gathered)
    copies = 2 * (cast + 2 * shard * gathered + 2 * n * gathered)
    copies += n * (gathered + reduced) + 2 * shard * reduced
    full = shard * (x["state_bytes"] + 4)
    return {
        "step_s": step,
        "state_bytes": state,
        "stage_s": stage,
        "write_s": write,
        "cost_s": cost,
        "interval_s": interval,
        "kept": 1 - cost / interval,
        "ridge_forward": gathered * x["flops"] / (2 * x["link"]),
        "ridge_backward": gathered * x["flops"] / (4 * x["link"]),
        "ridge_recompute": gathered * x["flops"] / (6 * x["link"]),
        "exposed_s": exposed if ranks > 1 else 0.0,
        "copies_s": copies / x["memory"],
        "fsdp2_s": step + copies / x["memory"] + (exposed if ranks > 1 else 0.0),
        "in_place_s": step + cast / x["memory"] + (exposed if ranks > 1 else 0.0),
        "peak_bytes": max(full, state + x["activation_bytes"] * x["tokens"]),
    }


def step_from_flops(x: dict) -> float:
    return 6 * x["parameters"] * x["tokens"] / x["flops"]


def models() -> dict[str, dict]:
    """The model presets of the page."""
    return {
        f"stock {name}, {parameters / 1e9:.2f} G": {
            "parameters": parameters,
            "activation_bytes": activation_bytes,
        }
        for (name, _), (parameters, activation_bytes) in STOCK.items()
    }


def machines(results: list[Result]) -> dict[str, dict]:
    """The machine presets of the page: the rates that result files measured."""
    found: dict[str, dict] = {}
    names = {"pinned_d2h_bytes_per_s": "link", "nccl_gather_bytes_per_s": "peer"}
    for result in results:
        device = result.data["device"]
        flops, memory, _, peer = sheet_of(device) or (0, 0, 0, 0)
        if flops:
            label = f"{result.machine}, measured links"
            rates = found.setdefault(label, {"flops": flops, "memory": memory, "peer": peer})
            rates |= {names[k]: v for k, v in result.data["link"].items() if k in names}
    return found


# -- against the rows -------------------------------------------------------------------------

CLAIMS = {  # (benchmark, row) → (what of the row, what predicts it), each within TOLERANCE
    ("checkpoint_stall", "overlapped_writer"): [
        ("staged_s", "stage_s"),
        ("step and what the save costs", "step and cost_s"),
    ],
    ("staging_copies", "cure_at_once"): [("staged_s", "stage_s"), ("staging_cost_s", "cost_s")],
    ("staging_copies", "cure_turns"): [
        ("staged_s", "stage_s"),
        ("step and what the save costs", "step and cost_s"),
    ],
    ("save_interval", "overlapped_writer"): [("kept", "kept")],
    ("fsdp_overlap", "fsdp2_no_collectives"): [("step_s", "step and copies_s")],
    ("fsdp_overlap", "fsdp2"): [("step_s", "fsdp2_s"), ("peak_allocated_bytes", "peak_bytes")],
    ("fsdp_overlap", "fsdp2_tuned"): [("step_s", "fsdp2_s")],
    ("fsdp_overlap", "fsdp2_in_place"): [
        ("step_s", "in_place_s"),
        ("peak_allocated_bytes", "peak_bytes"),
    ],
}
INPUT = "an input: the step without what the others add"
WRITER = "how much of the storage's rate a writer reaches is in no data sheet"
NOT_CLAIMED = {
    "none": INPUT,
    "no_communication": INPUT,
    "resident": INPUT,
    "cure_paced": "how long the link waits between two pieces is in no data sheet",
    "cure_tiny_kernel": "how long the engine waits at a kernel is in no data sheet",
}
UPDATE = "the rate of an update on the host depends on its memory and cores: in no data sheet"
REASONS = {
    "checkpoint_stall": WRITER,
    "offload_step": UPDATE,
    "activation_offload": "what recomputation and copies cost together is in no formula here",
}
HOST = "the host launches kernels more slowly than the device runs them"
LONG_COPY = "the copy takes more than half a step: what hides depends on where the step reads"
COMPILED = "compiled kernels keep and move fewer bytes than are counted here"
SHARED_HOST = "other training on the same host took part of the memory's rate"
NO_STEP = "no row without it at these tokens"
AT_ONCE = {"cure_at_once"}


def sheet_of(device: str) -> tuple[float, float, float, float] | None:
    """The data sheet of a device as torch names it: ``NVIDIA H100 80GB HBM3`` is an H100."""
    found = (sheet for name, sheet in DATA_SHEETS.items() if name.split()[1] in device)
    return next(found, None)


def outside(benchmark: str, row: dict, x: dict, step: float | None) -> str | None:
    """Why the formulas say nothing about a row of a way that they claim, or None."""
    if row.get("compiled"):
        return COMPILED
    if step is not None and benchmark == "fsdp_overlap":
        return HOST if step_from_flops(x) < 0.4 * step else None
    if step is not None and benchmark in ("checkpoint_stall", "staging_copies"):
        return LONG_COPY if predict(x)["stage_s"] > 0.5 * step else None
    return None


def inputs_of(result: Result, row: dict, step_s: float | None) -> dict | None:
    """What the page would be given for ``row``: its machine, its model and the step without it."""
    data, ranks = result.data, result.data["ranks"]
    model = STOCK.get((row["model"], ranks))
    sheet = sheet_of(data["device"])
    if model is None or sheet is None:
        return None
    parameters, activation_bytes = model
    flops, memory, link, peer = sheet
    measured = data["link"]
    peer_link = "copy_engine" if row["name"] == "fsdp2_in_place" else "nccl"
    return {
        **{"parameters": parameters, "ranks": ranks, "tokens": row.get("tokens", 0)},
        **{"state_bytes": 12, "gather_bytes": 2, "units": UNITS, "flops": flops},
        "reduce_bytes": 4 if row.get("reduce_dtype") == "float32" else 2,
        "activation_bytes": activation_bytes,
        "step_s": step_s or 0.0,
        "memory": memory,
        "link": measured.get("pinned_d2h_bytes_per_s", link),
        "peer": measured.get(f"{peer_link}_gather_bytes_per_s", peer),
        "storage": data["workload"].get("memory_storage_bytes_per_s", 1e9),
        "reads": row.get("loop") == "reads",
        "way": "at_once" if row["name"] in AT_ONCE else "in_turn",
        "failure_s": 86_400.0,
    }


def step_without(result: Result, row: dict) -> float | None:
    """The step of the row of the same case that has no save and no communication in it."""
    case = [parameter for parameter in PARAMETERS if parameter != "every"]
    case += ["activation_checkpointing", "reduce_dtype"]
    for other in result.rows:
        same = all(other.get(parameter) == row.get(parameter) for parameter in case)
        if same and other["name"] in ("none", "no_communication"):
            return other.get("step_s")
    return None


def stock_rows() -> list[tuple[Result, dict]]:
    found = {name for name, _ in CLAIMS} | {"offload_step", "activation_offload"}
    results = [load(path) for name in sorted(found) for path in files(ROOT, "results", name)]
    stock = {model for model, _ in STOCK} | {"llama-8b"}
    return [(r, row) for r in results for row in r.rows if row.get("model") in stock]


def table() -> list[dict]:
    """A line for each stock-model row and claim; a row without a claim has its ``reason``."""
    lines = []
    stalls = [r for r, _ in stock_rows() if r.data["benchmark"] == "checkpoint_stall"]
    for result, row in stock_rows():
        benchmark = result.data["benchmark"]
        line = {"benchmark": benchmark, "machine": result.machine, "row": row["name"]}
        line |= {p: row[p] for p in PARAMETERS if row.get(p) is not None}
        claims = CLAIMS.get((benchmark, row["name"]), [])
        source = stalls[-1] if benchmark == "save_interval" else result
        step = step_without(source, row)
        x = inputs_of(result, row, step)
        reason = NOT_CLAIMED.get(row["name"], REASONS.get(benchmark, NO_STEP))
        if claims and x is not None and (why := outside(benchmark, row, x, step)):
            memory = [claim for claim in claims if claim[1] == "peak_bytes" and why == HOST]
            claims, reason = memory, why
        if row.get("beside") and any(claim[1] == "stage_s" for claim in claims):
            claims = [claim for claim in claims if claim[1] != "stage_s"]
            reason = SHARED_HOST
        done = []
        for what, how in claims:
            claim = one_claim(row, x, step, what, how)
            if claim is not None:
                done.append(line | {"what": what} | claim)
        lines += done or [line | {"reason": reason}]
    return lines


def one_claim(row: dict, x: dict | None, step: float | None, what: str, how: str) -> dict | None:
    """Predicted and measured, or None where the row or the inputs lack what it takes."""
    beside = what.startswith("step and")
    measured = row.get("step_s") if beside else row.get(what)
    if x is None or measured is None or (step is None and how != "peak_bytes"):
        return None
    if row.get("activation_checkpointing") and how == "peak_bytes":
        return None
    if beside:
        measured += row.get("cost_s", row.get("staging_cost_s"))
    found = predict(x)
    predicted = step + found[how.removeprefix("step and ")] if "step and" in how else found.get(how)
    if predicted == 0:  # nothing to be off by a share of
        return None
    return {
        "predicted": float(f"{predicted:.4g}"),
        "measured": float(f"{measured:.4g}"),
        "error": round(predicted / measured - 1, 4),
    }


def main() -> int:
    lines = table()
    text = json.dumps(lines, indent=1) + "\n"
    off = [line for line in lines if abs(line.get("error", 0)) > TOLERANCE]
    if "--check" not in sys.argv:
        TABLE.write_text(text, encoding="utf-8")
    elif not TABLE.exists() or TABLE.read_text(encoding="utf-8") != text:
        print(f"{TABLE.name} is not what the formulas say: python -m benchmarks.will_it_hide")
        return 1
    claimed = sum("what" in line for line in lines)
    print(f"{claimed} figures of stock models predicted, {len(off)} of them badly")
    for line in off:
        print(f"off by more than {TOLERANCE:.0%}: {line}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
