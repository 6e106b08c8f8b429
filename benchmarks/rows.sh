#!/usr/bin/env bash
# Measure the rows of one part on the GPUs of this machine:
#
#     benchmarks/rows.sh PART [SECONDS]    # files go to $OUT, by default benchmarks
#
# A part can be started again: commands with --until go on where they were cut off, the others add a
# sample. One that fails says so, and the next one runs. SMALL=1 rehearses on a CPU.
# Files of `sharding` are joined to those in benchmarks/results by benchmarks/join_rows.py. The others go
# on from what lies in $OUT/results: copy benchmarks/results there before, and back afterwards.
# Rows say which commit they are of: a copy without .git is told it, by
# MEASURED_COMMIT=$(git rev-parse --short=10 HEAD) of the checkout that it was made from.
set -uo pipefail
cd "$(dirname "$0")/.."
part=${1:?name a part: tests verify saves threads first_saves loads offload 8bit sharding activations}
seconds=${2:-540}
out=${OUT:-benchmarks}
end=$(($(date +%s) + seconds))
python() { command python3 "$@"; }
torchrun() { python -m torch.distributed.run "$@"; }
gpus=$(python -c 'import torch; print(torch.accelerator.device_count() or 2)')
options=(--out "$out")
models=(qwen3-1.7b gpt2-xl mixtral-1.2b)
if [ -n "${SMALL:-}" ]; then
    options+=(--small)
    models=(gpt2-tiny)
fi

seconds_left() { echo $((end - $(date +%s))); }

# on_ranks NUMBER BENCHMARK ARGUMENT...
on_ranks() { torchrun --nproc-per-node="$1" --max-restarts=2 "benchmarks/$2.py" "${options[@]}" "${@:3}"; }

on_each_gpu() { on_ranks "$gpus" "$@"; }

case $part in
tests)
    python -m pytest -q tests/fsdp2/test_*_on_gpu.py # the others share one GPU and judge by time
    for program in "in_place_troubles.py" "in_place_training.py half 0 few_policies"; do
        # shellcheck disable=SC2086
        torchrun --nproc-per-node=2 tests/data/$program
    done
    python -m pytest -q $(ls tests/*/test_*_on_gpu.py | grep -v fsdp2)
    ;;
verify)
    timeout "$(seconds_left)" python3 tools/verify.py --ranks "$gpus"
    if [ "$out" != benchmarks ]; then
        cp "$(ls -t harness/verified/*-x"$gpus".json | head -n 1)" "$out"
    fi
    ;;
saves)
    rows="overlapped_writer,overlapped_writer loaded back"
    intervals="overlapped_writer every 20,overlapped_writer every 100"
    peers="torch_checkpointing,default_stager_ordered"
    on_each_gpu checkpoint_stall --pairs 6 --until "$(seconds_left)" --only "$rows,$intervals,$peers"
    for model in "${models[@]}"; do
        on_each_gpu checkpoint_stall --model "$model" --pairs 6 --until "$(seconds_left)" --only "$rows"
    done
    ;;
threads)
    for model in "${models[@]:0:2}"; do
        on_each_gpu checkpoint_stall --model "$model" --until "$(seconds_left)" \
            --only "overlapped_writer_1_thread,overlapped_writer_7_threads"
    done
    ;;
first_saves)
    # A process has one first save, which is one sample. The rows that matter most come first.
    first=${models[0]}
    for model in "${models[@]}" "$first" "$first" "${models[@]:1}" "$first" "$first"; do
        if [ "$(seconds_left)" -gt 60 ]; then
            on_each_gpu first_save --model "$model"
        fi
    done
    on_each_gpu first_save --model "$first" --unprepared
    ;;
loads)
    on_each_gpu restart --keep --until "$(seconds_left)"
    on_each_gpu restart --replicated --keep --until "$(seconds_left)"
    on_ranks 1 restart --keep --until "$(seconds_left)"
    on_each_gpu restart --until "$(seconds_left)" # what one rank has saved
    ;;
offload)
    on_ranks 1 offload_step --until "$(seconds_left)"
    on_ranks 1 offload_step --what peers --peers torchao fsdp2_cpu_offload --until "$(seconds_left)"
    ;;
8bit)
    on_each_gpu offload_step --what 8bit --until "$(seconds_left)"
    ;;
sharding)
    chooses=chooses_1024,chooses_2048,chooses_4096
    on_each_gpu fsdp_overlap --only "bitwise,link,small,$chooses,eager,tuned,compiled" \
        --until "$(seconds_left)"
    ;;
activations)
    on_ranks 1 activation_offload --until "$(seconds_left)"
    ;;
*)
    echo "no part $part" >&2
    exit 2
    ;;
esac
