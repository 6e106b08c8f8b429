#!/usr/bin/env bash
# Measure the rows of one part on the GPUs of this machine:
#
#     benchmarks/rows.sh PART [SECONDS]    # files go to $OUT, by default benchmarks
#
# Each command goes on where it was cut off, so a part can be started again. SMALL=1 rehearses on a CPU.
set -uo pipefail
cd "$(dirname "$0")/.."
part=${1:?name a part: verify saves first_saves loads first_step offload sharding activations}
seconds=${2:-540}
out=${OUT:-benchmarks}
until=$(($(date +%s) + seconds))
gpus=$(python -c 'import torch; print(max(1, torch.accelerator.device_count()))')
options=(--out "$out")
[ -z "${SMALL:-}" ] || options+=(--small)

left() { echo $((until - $(date +%s))); }

on_each() { torchrun --nproc-per-node="$gpus" --max-restarts=2 "benchmarks/$1.py" "${options[@]}" "${@:2}"; }

case $part in
verify)
    python tests/verify.py
    python -m pytest -q tests -k on_gpu
    ;;
saves)
    for model in qwen3-1.7b gpt2-xl mixtral-1.2b; do
        on_each checkpoint_stall --model "$model" --pairs 6 --until "$(left)"
    done
    on_each checkpoint_stall --pairs 6 --until "$(left)"
    ;;
first_saves)
    for model in qwen3-1.7b qwen3-1.7b qwen3-1.7b gpt2-xl mixtral-1.2b gpt2-xl mixtral-1.2b qwen3-1.7b qwen3-1.7b; do
        [ "$(left)" -gt 60 ] && on_each first_save --model "$model"
    done
    on_each first_save --model qwen3-1.7b --unprepared
    ;;
loads)
    on_each restart --keep --until "$(left)"
    gpus=1 && on_each restart --keep --until "$(left)"
    ;;
first_step)
    for way in write in_turn beside folder from_pretrained in_turn beside remove; do
        on_each first_step --way "$way"
    done
    ;;
offload)
    gpus=1 && on_each offload_step --until "$(left)"
    python benchmarks/offload_step.py "${options[@]}" --what peers --until "$(left)"
    ;;
sharding)
    on_each fsdp_overlap --until "$(left)"
    ;;
activations)
    python benchmarks/activation_offload.py "${options[@]}" --until "$(left)"
    ;;
*)
    echo "no part $part" >&2
    exit 2
    ;;
esac
