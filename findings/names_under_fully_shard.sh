#!/usr/bin/env bash
# names_under_fully_shard, transformers==5.23.0 torch==2.13.0: `save_pretrained` of a GPT-NeoX stores `lm_head.weight` instead of `embed_out.weight` once `fully_shard` has seen the model.
# Guess: names come from the state dict and the architecture, which sharding does not change.
# Instead: compare the names with those of an unsharded save of the same config, or export with
#     `overlap_recipes.checkpoint.export`.
# Took: 42 s whole, on two cores
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} transformers==5.23.0 safetensors==0.8.0 torch==2.13.0 numpy==2.4.6

cat > program.py <<'END'
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 1}
config = transformers.GPTNeoXConfig(**sizes, num_attention_heads=2)
model = transformers.GPTNeoXForCausalLM(config)
model.save_pretrained("whole")
fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
model.save_pretrained("sharded", state_dict=state)
whole, sharded = load_file("whole/model.safetensors"), load_file("sharded/model.safetensors")
print("only in the unsharded model's file:", sorted(whole.keys() - sharded.keys()))
print("only in the sharded model's file:", sorted(sharded.keys() - whole.keys()))
END
cat > expected <<'END'
only in the unsharded model's file: ['embed_out.weight']
only in the sharded model's file: ['lm_head.weight']
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "names_under_fully_shard: this is no longer what was seen with transformers==5.23.0 torch==2.13.0:"
    cat difference
    exit 1
fi
