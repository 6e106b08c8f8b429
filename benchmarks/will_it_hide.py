"""The formulas of the page "Will it hide?", and how they do against what was measured.

    python -m benchmarks.will_it_hide           # write guide/predicted.json
    python -m benchmarks.will_it_hide --check   # exit 1 if it differs, or a claim is off

``_static/will_it_hide.js`` has the same formulas; a test compares them. A prediction takes the
model's shape, the rates that the row's file measured of its link, the device's data sheet and,
where a way adds to a step, the step without it: another row's, or for a save that of the same
row's windows without one. No term is fitted to rows: a row that a formula misses is listed in
``will_it_hide.toml`` and shown with its error. A test holds the formulas of whole steps against
runs that came after them and that no page shows.
"""

import json
import math
import sys
import tomllib
from pathlib import Path

from benchmarks.result_files import PARAMETERS, Result, files, load

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "guide" / "predicted.json"
TOLERANCE = 0.15
UNITS = 14  # of FSDP, where the model does not say: what one gather is of all
ADAM_BYTES = 28  # that one update moves a parameter: float32 state in and out, bfloat16 around it
HOST_BOUND = 0.25  # of the data sheet's FLOP/s: below it a save's steps are the host's
WITHOUT = ("none", "no_communication", "resident")  # rows of a step without what the others add
DATA_FILE = Path(__file__).with_suffix(".toml")
DATA = tomllib.loads(DATA_FILE.read_text(encoding="utf-8"))
STOCK = {(model.pop("name"), model.pop("ranks")): model for model in DATA["models"]}
DATA_SHEETS, WHY = DATA["data_sheets"], DATA["why"]
CLAIMS = {
    (benchmark, row): claims
    for benchmark, rows in DATA["claims"].items()
    for row, claims in rows.items()
}


def predict(x: dict) -> dict[str, float]:
    """All results for the inputs ``x``: counts, bytes, seconds, bytes/s and FLOP/s."""
    n, ranks, step = x["parameters"], x["ranks"], x["step_s"] or step_from_flops(x)
    forward = step / (4 if x["recompute"] else 3)
    backward = step - forward
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
    load = x["layer_parameters"] * x["gather_bytes"] / x["link"]  # and out again
    update = x["layer_parameters"] * ADAM_BYTES / x["adam"]
    gathered, reduced = x["gather_bytes"], x["reduce_bytes"]
    sent = (ranks - 1) / ranks
    gather, reduce = n * gathered * sent / x["peer"], n * reduced * sent / x["peer"]
    ends = (gather + reduce) / x["units"]  # the first gather and the last reduction
    exposed = max(0.0, gather - forward) + max(0.0, gather + reduce - backward) + ends
    exposed = exposed if ranks > 1 else 0.0
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
        "streamed_s": max(forward, load, update) + max(backward, load),
        "streamed_in_backward_s": max(step, 2 * load, update),
        "exposed_s": exposed,
        "copies_s": copies / x["memory"],
        "fsdp2_s": max(x["host_s"], step + copies / x["memory"] + exposed),
        "no_collectives_s": max(x["host_s"], step + copies / x["memory"]),
        "in_place_s": max(x["host_s"], step + cast / x["memory"] + exposed),
        "peak_bytes": max(full, state + x["activation_bytes"] * x["tokens"]),
    }


def step_from_flops(x: dict) -> float:
    return (8 if x["recompute"] else 6) * x["parameters"] * x["tokens"] / x["flops"]


def models() -> dict[str, dict]:
    """The model presets of the page."""
    return {f"stock {name}, {x['parameters'] / 1e9:.2f} G": x for (name, _), x in STOCK.items()}


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
            for update in rows_named(result, "host"):
                rates["adam"] = update["update_bytes_per_s"]
    return found


def rows_named(result: Result, *names: str, **case: object) -> list[dict]:
    """The rows of ``names`` that have ``case``."""
    rows = [row for row in result.rows if row["name"] in names]
    return [row for row in rows if all(row.get(p) == value for p, value in case.items())]


# -- against the rows -------------------------------------------------------------------------


def sheet_of(device: str) -> tuple[float, float, float, float] | None:
    """The data sheet of a device as torch names it: ``NVIDIA H100 80GB HBM3`` is an H100."""
    found = (sheet for name, sheet in DATA_SHEETS.items() if name.split()[1] in device)
    return next(found, None)


def least_tokens(result: Result, row: dict) -> dict | None:
    """The row that says what the host takes to launch a step of this way: at the fewest tokens."""
    case = {p: row.get(p) for p in ("model", "compiled", "activation_checkpointing")}
    others = rows_named(result, DATA["launches"].get(row["name"], row["name"]), **case)
    return min((r for r in others if "step_s" in r), key=lambda r: r["tokens"], default=None)


def inputs_of(result: Result, row: dict, step_s: float | None) -> dict | None:
    """What the page would be given for ``row``: its machine, its model and the step without it."""
    data, ranks = result.data, result.data["ranks"]
    model = STOCK.get((row["model"], min(ranks, 2)))
    sheet = sheet_of(data["device"])
    if model is None or sheet is None:
        return None
    flops, memory, link, peer = sheet
    measured, offload = data["link"], data["benchmark"] == "offload_step"
    peer_link = "copy_engine" if row["name"] == "fsdp2_in_place" else "nccl"
    least = least_tokens(result, row) if data["benchmark"] == "fsdp_overlap" else None
    update = rows_named(result, "host")
    return {
        **model,
        "ranks": ranks,
        "tokens": row.get("tokens", 0),
        "state_bytes": 12,
        "gather_bytes": 2,
        "reduce_bytes": 4 if row.get("reduce_dtype") == "float32" else 2,
        "units": UNITS,
        "recompute": offload or bool(row.get("activation_checkpointing")),
        "step_s": step_s or 0.0,
        "host_s": least["step_s"] if least else 0.0,
        "adam": update[0]["update_bytes_per_s"] if update else memory,
        "flops": flops,
        "memory": memory,
        "link": measured.get("pinned_d2h_bytes_per_s", link),
        "peer": measured.get(f"{peer_link}_gather_bytes_per_s", peer),
        "storage": data["workload"].get("memory_storage_bytes_per_s", 1e9),
        "reads": row.get("loop") == "reads",
        "way": "at_once" if row["name"] == "cure_at_once" else "in_turn",
        "failure_s": 86_400.0,
    }


def step_without(result: Result, row: dict) -> float | None:
    """The step of the same case that has no save and no communication in it.

    Rows of saves have it themselves; of others it is another row's.
    """
    if "staging_cost_s" in row or "every" in row:
        return row["step_s"]
    parameters = ("model", "loop", "compiled", "step", "tokens", "layers")
    case = {p: row.get(p) for p in (*parameters, "activation_checkpointing", "reduce_dtype")}
    others = rows_named(result, *WITHOUT, **case)
    return others[0].get("step_s") if others else None


def stock_rows() -> list[tuple[Result, dict]]:
    found = {name for name, _ in CLAIMS} | {"activation_offload"}
    results = [load(path) for name in sorted(found) for path in files(ROOT, "results", name)]
    stock = {model for model, _ in STOCK}
    return [(r, row) for r in results for row in r.rows if row.get("model") in stock]


def table() -> list[dict]:
    """A line for each stock-model row and claim; a row without a claim has its ``reason``."""
    lines = []
    rows = stock_rows()
    stalls = {r.machine: r for r, _ in rows if r.data["benchmark"] == "checkpoint_stall"}
    for result, row in rows:
        benchmark = result.data["benchmark"]
        line = {"benchmark": benchmark, "machine": result.machine, "row": row["name"]}
        case = (*PARAMETERS, "reduce_dtype", "activation_checkpointing")
        line |= {p: row[p] for p in case if row.get(p) is not None}
        source = stalls[result.machine] if benchmark == "save_interval" else result
        step = step_without(source, row)
        x = inputs_of(result, row, step)
        claims, reason = claims_of(result, row, x, step)
        done = [one_claim(line, row, x, step, *claim) for claim in claims]
        lines += done or [line | {"reason": reason}]
    return lines


def claims_of(
    result: Result, row: dict, x: dict | None, step: float | None
) -> tuple[list[tuple[str, str]], str]:
    """What the formulas claim of a row, and why they claim no more."""
    benchmark = result.data["benchmark"]
    claims = CLAIMS.get((benchmark, row["name"]), [])
    if not claims or x is None:
        reason = DATA["not_claimed_of"].get(benchmark, WHY["not_listed"])
        return [], DATA["not_claimed"].get(row["name"], reason)
    timed = [claim for claim in claims if claim[1] != "peak_bytes"]
    memory = [c for c in claims if c[1] == "peak_bytes" and c[0] in row and not x["recompute"]]
    if "step_s" not in row and "kept" not in row:
        return memory, WHY["no_time"]
    if step is None:
        return memory, WHY["no_step"]
    if benchmark == "fsdp_overlap" and row is least_tokens(result, row):
        return memory, WHY["least"]
    if benchmark == "checkpoint_stall" and step_from_flops(x) < HOST_BOUND * step:
        return memory, WHY["host"]
    if result.data["ranks"] > 1:
        timed = [claim for claim in timed if claim[1] != "stage_s"]
    return timed + memory, WHY["shared_host"]


def one_claim(line: dict, row: dict, x: dict, step: float, what: str, how: str) -> dict:
    """``line`` with what is predicted and measured, and why it is missed where that is known."""
    measured, predicted = row.get(what), predict(x)[how.removeprefix("step and ")]
    if what == "step and staging":
        measured, predicted = row["step_s"] + row["staging_cost_s"], step + predicted
    line |= {
        "what": what,
        "predicted": float(f"{predicted:.4g}"),
        "measured": float(f"{measured:.4g}"),
        "error": round(predicted / measured - 1, 4),
    }
    listed = [entry for entry in DATA["missed"] if entry["row"].items() <= line.items()]
    return line | ({"missed": listed[0]["why"]} if listed else {})


def surprises(lines: list[dict]) -> list[dict]:
    """Lines off by more than the tolerance that are not listed as missed, or listed and not off."""
    return [x for x in lines if (abs(x.get("error", 0)) > TOLERANCE) != ("missed" in x)]


def main() -> int:
    lines = table()
    text = json.dumps(lines, indent=1) + "\n"
    if "--check" not in sys.argv:
        TABLE.write_text(text, encoding="utf-8")
    elif not TABLE.exists() or TABLE.read_text(encoding="utf-8") != text:
        print(f"{TABLE.name} is not what the formulas say: python -m benchmarks.will_it_hide")
        return 1
    claimed = sum("what" in line for line in lines)
    missed = sum("missed" in line for line in lines)
    print(f"{claimed} figures of stock models predicted, {missed} of them missed, as listed")
    for line in surprises(lines):
        wrong = "is listed as missed, and is not" if "missed" in line else "is missed, not listed"
        print(f"{wrong}, by {TOLERANCE:.0%}, in {DATA_FILE.name}: {line}")
    return 1 if surprises(lines) else 0


if __name__ == "__main__":
    sys.exit(main())
