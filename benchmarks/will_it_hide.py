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
DATA_SHEETS = DATA["data_sheets"]
WHY = DATA["why"]
CASE = tuple(PARAMETERS) + ("reduce_dtype", "activation_checkpointing")
CASE_OF_A_STEP = ("model", "loop", "compiled", "step", "tokens", "layers")
CASE_OF_A_STEP += ("activation_checkpointing", "reduce_dtype")
RATES = {"pinned_d2h_bytes_per_s": "link", "nccl_gather_bytes_per_s": "peer"}  # as results have it

STOCK: dict[tuple[str, int], dict] = {}  # by the model's name and the number of ranks
for model in DATA["models"]:
    key = (model.pop("name"), model.pop("ranks"))
    STOCK[key] = model

CLAIMS: dict[tuple[str, str], list] = {}  # by benchmark and row
for benchmark, claims_of_rows in DATA["claims"].items():
    for row_name, claims in claims_of_rows.items():
        CLAIMS[benchmark, row_name] = claims


def predict(x: dict) -> dict[str, float]:
    """All results for the inputs ``x``: counts, bytes, seconds, bytes/s and FLOP/s."""
    step = x["step_s"] or step_from_flops(x)
    found = {"step_s": step}
    found |= predict_save(x, step)
    found |= predict_start(x, found)
    found |= predict_streaming(x, step)
    found |= predict_sharding(x, step)
    return found


def predict_save(x: dict, step: float) -> dict[str, float]:
    """What a save costs, and how often to make one."""
    state = x["parameters"] / x["ranks"] * x["state_bytes"]
    stage = state / x["link"]
    write = state / x["storage"]
    behind = max(0.0, stage - step)  # what a copy that nothing delays does not hide
    costs = {
        "blocking": stage + write,
        "at_once": stage if x["reads"] else behind,
        "in_turn": behind,
    }
    cost = costs[x["way"]]
    shortest = stage + write  # one save at a time
    interval = max(shortest, math.sqrt(2 * cost * x["failure_s"]))
    return {
        "state_bytes": state,
        "stage_s": stage,
        "write_s": write,
        "cost_s": cost,
        "interval_s": interval,
        "kept": 1 - cost / interval,
    }


def predict_start(x: dict, save: dict[str, float]) -> dict[str, float]:
    """What a load takes, and the first save of a run that has prepared nothing."""
    state = save["state_bytes"]
    return {
        "load_s": state / min(x["read"], x["link"]),
        "first_save_s": save["cost_s"] + state / x["lock"],
    }


def predict_streaming(x: dict, step: float) -> dict[str, float]:
    """A step whose layers and optimizer are on the host, and what hides the load of a layer."""
    forward, backward = passes(x, step)
    # Each pass loads all layers. Backward sends gradients of as many bytes the other way meanwhile.
    load = x["layer_parameters"] * x["gather_bytes"] / x["link"]
    update = x["layer_parameters"] * ADAM_BYTES / x["adam"]
    return {
        "ridge_forward": x["gather_bytes"] * x["flops"] / (2 * x["link"]),
        "ridge_backward": x["gather_bytes"] * x["flops"] / (4 * x["link"]),
        "ridge_recompute": x["gather_bytes"] * x["flops"] / (6 * x["link"]),
        "streamed_s": max(forward, load, update) + max(backward, load),
        "streamed_in_backward_s": max(step, 2 * load, update),
    }


def predict_sharding(x: dict, step: float) -> dict[str, float]:
    """Steps of FSDP2 as it is, without collectives and in place; and a rank's memory."""
    parameters = x["parameters"]
    shard = parameters / x["ranks"]
    gather_bytes = x["gather_bytes"]
    reduce_bytes = x["reduce_bytes"]
    exposed = exposed_seconds(x, step)

    # Bytes that FSDP2 moves on the device, each as often as it is read or written
    cast = shard * (4 + gather_bytes)  # a float32 shard, to what is gathered
    shards_in = 2 * shard * gather_bytes  # into the buffer that is sent
    weights_out = 2 * parameters * gather_bytes  # of the buffer that was received
    gradients_in = parameters * (gather_bytes + reduce_bytes)
    sums_out = 2 * shard * reduce_bytes
    copies = 2 * (cast + shards_in + weights_out)  # once in forward and once in backward
    copies += gradients_in + sums_out
    copies_s = copies / x["memory"]
    cast_s = cast / x["memory"]

    at_update = shard * (x["state_bytes"] + 4)  # all state, and float32 gradients
    at_turn = shard * x["state_bytes"] + x["activation_bytes"] * x["tokens"]
    return {
        "exposed_s": exposed,
        "copies_s": copies_s,
        "fsdp2_s": max(x["host_s"], step + copies_s + exposed),
        "no_collectives_s": max(x["host_s"], step + copies_s),
        "in_place_s": max(x["host_s"], step + cast_s + exposed),
        "peak_bytes": max(at_update, at_turn),
    }


def exposed_seconds(x: dict, step: float) -> float:
    """What forward does not hide of one gather, and backward of a gather and a reduction."""
    if x["ranks"] == 1:
        return 0.0
    forward, backward = passes(x, step)
    sent = (x["ranks"] - 1) / x["ranks"]
    gather = x["parameters"] * x["gather_bytes"] * sent / x["peer"]
    reduce = x["parameters"] * x["reduce_bytes"] * sent / x["peer"]
    ends = (gather + reduce) / x["units"]  # the first gather and the last reduction
    return max(0.0, gather - forward) + max(0.0, gather + reduce - backward) + ends


def passes(x: dict, step: float) -> tuple[float, float]:
    """Seconds of forward, and of backward, which computes forward again if it recomputes."""
    forward = step / (4 if x["recompute"] else 3)
    return forward, step - forward


def step_from_flops(x: dict) -> float:
    return (8 if x["recompute"] else 6) * x["parameters"] * x["tokens"] / x["flops"]


def models() -> dict[str, dict]:
    """The model presets of the page."""
    return {f"stock {name}, {x['parameters'] / 1e9:.2f} G": x for (name, _), x in STOCK.items()}


def machines(results: list[Result]) -> dict[str, dict]:
    """The machine presets of the page: the rates that result files measured."""
    found: dict[str, dict] = {}
    for result in results:
        sheet = sheet_of(result.data["device"])
        if sheet is None:
            continue
        flops, memory, _, peer = sheet
        label = f"{result.machine}, measured links"
        rates = found.setdefault(label, {"flops": flops, "memory": memory, "peer": peer})
        for field, value in result.data["link"].items():
            if field in RATES:
                rates[RATES[field]] = value
        for update in rows_named(result, "host"):
            rates["adam"] = update["update_bytes_per_s"]
        for plain in rows_named(result, "plain_read", storage="disk"):
            rates["read"] = plain["plain_read_bytes_per_s"]
        for first in rows_named(result, "unprepared"):
            rates["lock"] = first["pinned_bytes"] / first["call_s"]
    return found


def rows_named(result: Result, *names: str, **case: object) -> list[dict]:
    """The rows of ``names`` that have ``case``."""
    found = []
    for row in result.rows:
        has_case = all(row.get(parameter) == value for parameter, value in case.items())
        if row["name"] in names and has_case:
            found.append(row)
    return found


# -- against the rows -------------------------------------------------------------------------


def sheet_of(device: str) -> tuple[float, float, float, float] | None:
    """The data sheet of a device as torch names it: ``NVIDIA H100 80GB HBM3`` is an H100."""
    for name, sheet in DATA_SHEETS.items():
        chip = name.split()[1]
        if chip in device:
            return sheet
    return None


def least_tokens(result: Result, row: dict) -> dict | None:
    """The row that says what the host takes to launch a step of this way: at the fewest tokens."""
    case = {p: row.get(p) for p in ("model", "compiled", "activation_checkpointing")}
    launched_as = DATA["launches"].get(row["name"], row["name"])
    timed = [other for other in rows_named(result, launched_as, **case) if "step_s" in other]
    if not timed:
        return None
    return min(timed, key=lambda other: other["tokens"])


def inputs_of(result: Result, row: dict, step_s: float | None) -> dict | None:
    """What the page would be given for ``row``: its machine, its model and the step without it."""
    data = result.data
    link_rates = data["link"]
    model = STOCK.get((row["model"], min(data["ranks"], 2)))
    sheet = sheet_of(data["device"])
    if model is None or sheet is None:
        return None
    flops, memory, link, peer = sheet
    peer_field = "nccl_gather_bytes_per_s"
    if row["name"] == "fsdp2_in_place":
        peer_field = "copy_engine_gather_bytes_per_s"

    host_s = 0.0
    if data["benchmark"] == "fsdp_overlap":
        least = least_tokens(result, row)
        if least is not None:
            host_s = least["step_s"]
    adam = memory  # of a benchmark in which nothing is updated on the host
    updates = rows_named(result, "host")
    if updates:
        adam = updates[0]["update_bytes_per_s"]
    offloads = data["benchmark"] == "offload_step"  # which recomputes in all rows
    return model | {
        "ranks": data["ranks"],
        "tokens": row.get("tokens", 0),
        "state_bytes": 12,
        "gather_bytes": 2,
        "reduce_bytes": 4 if row.get("reduce_dtype") == "float32" else 2,
        "units": UNITS,
        "recompute": offloads or bool(row.get("activation_checkpointing")),
        "step_s": step_s or 0.0,
        "host_s": host_s,
        "adam": adam,
        "flops": flops,
        "memory": memory,
        "link": link_rates.get("pinned_d2h_bytes_per_s", link),
        "peer": link_rates.get(peer_field, peer),
        "storage": data["workload"].get("memory_storage_bytes_per_s", 1e9),
        "read": row.get("plain_read_bytes_per_s", math.inf),
        "lock": math.inf,  # nothing is claimed of first saves
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
    case = {parameter: row.get(parameter) for parameter in CASE_OF_A_STEP}
    others = rows_named(result, *WITHOUT, **case)
    if not others:
        return None
    return others[0].get("step_s")


def stock_rows() -> list[tuple[Result, dict]]:
    """The rows of stock models in all benchmarks that are claimed, or could be."""
    benchmarks = {name for name, _ in CLAIMS} | {"activation_offload"}
    models_of_stock = {name for name, _ in STOCK}
    found = []
    for name in sorted(benchmarks):
        for path in files(ROOT, "results", name):
            result = load(path)
            for row in result.rows:
                if row.get("model") in models_of_stock:
                    found.append((result, row))
    return found


def table() -> list[dict]:
    """A line for each stock-model row and claim; a row without a claim has its ``reason``."""
    lines = []
    rows = stock_rows()
    stalls = {}  # by machine
    for result, _ in rows:
        if result.data["benchmark"] == "checkpoint_stall":
            stalls[result.machine] = result
    for result, row in rows:
        benchmark = result.data["benchmark"]
        line = {"benchmark": benchmark, "machine": result.machine, "row": row["name"]}
        for parameter in CASE:
            if row.get(parameter) is not None:
                line[parameter] = row[parameter]
        source = result
        if benchmark == "save_interval":  # whose rows have no step without a save
            source = stalls[result.machine]
        step = step_without(source, row)
        x = inputs_of(result, row, step)
        claims, reason = claims_of(result, row, x, step)
        for what, how in claims:
            lines.append(one_claim(line, row, x, step, what, how))
        if not claims:
            lines.append(line | {"reason": reason})
    return lines


def claims_of(
    result: Result, row: dict, x: dict | None, step: float | None
) -> tuple[list[tuple[str, str]], str]:
    """What the formulas claim of a row, and, for a row of which it is nothing, why."""
    benchmark = result.data["benchmark"]
    claims = CLAIMS.get((benchmark, row["name"]), [])
    if not claims or x is None:
        reason = DATA["not_claimed_of"].get(benchmark, WHY["not_listed"])
        return [], DATA["not_claimed"].get(row["name"], reason)
    timed = []
    memory = []
    for what, how in claims:
        if how != "peak_bytes":
            timed.append((what, how))
        elif what in row and not x["recompute"]:
            memory.append((what, how))
    if benchmark == "restart":
        if row["storage"] == "memory":
            return [], WHY["memory_load"]
        return timed, ""
    if "step_s" not in row and "kept" not in row:
        return memory, WHY["no_time"]
    if step is None:
        return memory, WHY["no_step"]
    if benchmark == "fsdp_overlap" and row is least_tokens(result, row):
        return memory, WHY["least"]
    if benchmark == "checkpoint_stall" and step_from_flops(x) < HOST_BOUND * step:
        return memory, WHY["host"]
    if result.data["ranks"] > 1:
        timed = [(what, how) for what, how in timed if how != "stage_s"]
    return timed + memory, WHY["shared_host"]


def one_claim(line: dict, row: dict, x: dict, step: float, what: str, how: str) -> dict:
    """``line`` with what is predicted and measured, and why it is missed where that is known."""
    predicted = predict(x)[how.removeprefix("step and ")]
    measured = row.get(what)
    if what == "step and staging":
        predicted = step + predicted
        measured = row["step_s"] + row["staging_cost_s"]
    line = line | {
        "what": what,
        "predicted": float(f"{predicted:.4g}"),
        "measured": float(f"{measured:.4g}"),
        "error": round(predicted / measured - 1, 4),
    }
    for entry in DATA["missed"]:
        if entry["row"].items() <= line.items():
            return line | {"missed": entry["why"]}
    return line


def surprises(lines: list[dict]) -> list[dict]:
    """Lines off by more than the tolerance that are not listed as missed, or listed and not off."""
    found = []
    for line in lines:
        is_off = abs(line.get("error", 0)) > TOLERANCE
        is_listed = "missed" in line
        if is_off != is_listed:
            found.append(line)
    return found


def main() -> int:
    lines = table()
    text = json.dumps(lines, indent=1) + "\n"
    if "--check" not in sys.argv:
        TABLE.write_text(text, encoding="utf-8")
    elif not TABLE.exists() or TABLE.read_text(encoding="utf-8") != text:
        print(f"{TABLE.name} is not what the formulas say: python -m benchmarks.will_it_hide")
        return 1
    claimed = [line for line in lines if "what" in line]
    missed = [line for line in lines if "missed" in line]
    print(
        f"{len(claimed)} figures of stock models predicted, {len(missed)} of them missed, as listed"
    )
    for line in surprises(lines):
        wrong = "is listed as missed, and is not" if "missed" in line else "is missed, not listed"
        print(f"{wrong}, by {TOLERANCE:.0%}, in {DATA_FILE.name}: {line}")
    return 1 if surprises(lines) else 0


if __name__ == "__main__":
    sys.exit(main())
