#!/usr/bin/env bash
# Measure the rows of one part on the GPUs of this machine:
#
#     benchmarks/rows.sh PART [SECONDS]    # files go to $OUT, by default benchmarks
#
# Each command goes on where it was cut off, so a part can be started again. SMALL=1 rehearses on a CPU.
set -uo pipefail
cd "$(dirname "$0")/.."
part=${1:?name a part: verify saves threads first_saves loads first_step offload sharding activations}
seconds=${2:-540}
out=${OUT:-benchmarks}
until=$(($(date +%s) + seconds))
all=$(python -c 'import torch; print(torch.accelerator.device_count() or 2)')
gpus=$all
options=(--out "$out")
models=(qwen3-1.7b gpt2-xl mixtral-1.2b)
if [ -n "${SMALL:-}" ]; then
    options+=(--small)
    models=(gpt2-tiny)
fi

left() { echo $((until - $(date +%s))); }

on_each() { torchrun --nproc-per-node="$gpus" --max-restarts=2 "benchmarks/$1.py" "${options[@]}" "${@:2}"; }

case $part in
verify)
    python tests/verify.py
    python -m pytest -q tests -k on_gpu
    ;;
saves)
    rows="overlapped_writer,overlapped_writer loaded back"
    peers="torch_checkpointing,default_stager_ordered"
    on_each checkpoint_stall --pairs 6 --until "$(left)" \
        --only "$rows,overlapped_writer every 20,overlapped_writer every 100,$peers"
    for model in "${models[@]}"; do
        on_each checkpoint_stall --model "$model" --pairs 6 --until "$(left)" --only "$rows"
    done
    ;;
threads)
    for model in "${models[@]:0:2}"; do
        on_each checkpoint_stall --model "$model" --until "$(left)" \
            --only "overlapped_writer_1_thread,overlapped_writer_7_threads"
    done
    ;;
first_saves)
    first=${models[0]}
    for model in "${models[@]}" "$first" "$first" "${models[@]:1}" "$first" "$first"; do
        [ "$(left)" -gt 60 ] && on_each first_save --model "$model"
    done
    on_each first_save --model "$first" --unprepared
    ;;
loads)
    on_each restart --keep --until "$(left)"
    gpus=1
    on_each restart --keep --until "$(left)"
    gpus=$all
    on_each restart --keep --until "$(left)"
    on_each restart --replicated --until "$(left)"
    ;;
first_step)
    for way in write in_turn beside folder from_pretrained in_turn beside remove; do
        on_each first_step --way "$way"
    done
    ;;
offload)
    gpus=1
    on_each offload_step --until "$(left)"
    on_each offload_step --what peers --peers torchao fsdp2_cpu_offload --until "$(left)"
    ;;
sharding)
    on_each fsdp_overlap --only link,eager,tuned,small,compiled --until "$(left)"
    ;;
activations)
    gpus=1
    on_each activation_offload --until "$(left)"
    ;;
*)
    echo "no part $part" >&2
    exit 2
    ;;
esac
