#!/usr/bin/env bash
# torch_checkpointing_not_strict, torch_checkpointing==0.1.1 torch==2.13.0: a weight that the checkpoint lacks keeps what it had, without a word; only an item that is missing as a whole raises.
# Guess: `load_state_dict` and `dcp.load` raise for a missing key, so this does.
# Instead: compare the names of what you load with the names of what was saved, which you save as
#     an item of their own.
# Took: 244 s whole, on two busy cores
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} torch_checkpointing==0.1.1 torch==2.13.0 numpy==2.4.6

cat > program.py <<'END'
import torch
import torch_checkpointing
from torch_checkpointing.storage import filesystem


def main() -> None:
    config = torch_checkpointing.CheckpointManager.Config.with_sync_save()
    config.storage_config = filesystem.LocalFileSystemStorageConfig(use_direct_io=False)
    manager = torch_checkpointing.CheckpointManager(config)
    manager.save("./saved", {"model": {"weight": torch.ones(2)}})
    renamed = {"model": {"layer.weight": torch.full((2,), 7.0)}}
    print("renamed weight:", manager.load("./saved", into=renamed)["model"])
    try:
        manager.load("./saved", into={"optimizer": {}})
    except FileNotFoundError as error:
        print("missing item:", type(error).__name__)
    manager.close()


if __name__ == "__main__":
    main()
END
cat > expected <<'END'
renamed weight: {'layer.weight': tensor([7., 7.])}
missing item: FileNotFoundError
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "torch_checkpointing_not_strict: this is no longer what was seen with torch_checkpointing==0.1.1 torch==2.13.0:"
    cat difference
    exit 1
fi
