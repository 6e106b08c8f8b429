#!/usr/bin/env bash
# obstore_as_fsspec, obstore==0.12.1 fsspec==2026.2.0: `FsspecStore` overwrites with `mode="create"` and shows files before their transaction ends, where obstore itself and fsspec do as asked.
# Guess: both are honoured, or raise.
# Instead: commit with `obstore.put(store, path, data, mode="create")`; fsspec's local
#     `put_file(mode="create")` overwrites, too.
# Took: 222 s whole, on two cores that twenty other programs had
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} obstore==0.12.1 fsspec==2026.2.0

cat > program.py <<'END'
import fsspec
import obstore
from obstore.fsspec import FsspecStore
from obstore.store import MemoryStore

store = MemoryStore()
obstore.put(store, "commit", b"first")
try:
    obstore.put(store, "commit", b"second", mode="create")
except obstore.exceptions.AlreadyExistsError:
    print("obstore.put refuses")

for name, files in (("fsspec", fsspec.filesystem("memory")), ("obstore", FsspecStore("memory"))):
    files.pipe_file("folder/commit", b"first")
    try:
        files.pipe_file("folder/commit", b"second", mode="create")
        print(name, "pipe_file overwrites")
    except FileExistsError:
        print(name, "pipe_file refuses")
    with files.transaction:
        with files.open("folder/later", "wb") as file:
            file.write(b"data")
        print(name, "shows it before the transaction ends:", files.exists("folder/later"))

with open("here", "wb") as file:
    file.write(b"second")
with open("commit", "wb") as file:
    file.write(b"first")
fsspec.filesystem("file").put_file("here", "commit", mode="create")
print("fsspec's local put_file leaves", open("commit", "rb").read())
END
cat > expected <<'END'
obstore.put refuses
fsspec pipe_file refuses
fsspec shows it before the transaction ends: False
obstore pipe_file overwrites
obstore shows it before the transaction ends: True
fsspec's local put_file leaves b'second'
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "obstore_as_fsspec: this is no longer what was seen with obstore==0.12.1 fsspec==2026.2.0:"
    cat difference
    exit 1
fi
