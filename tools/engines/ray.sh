#!/usr/bin/env bash
# Jobs under Ray Train: installs Ray in a temporary environment on top of the project's, and calls ray_train.py.
#
#   ray.sh [SCENARIO...]
set -euo pipefail
here=$(dirname "$(realpath "$0")")
python=$(realpath -s "$(command -v "${PYTHON:-$here/../../.venv/bin/python}")")
dir=$(mktemp -d /tmp/ray.XXXXXX)
trap 'rm -rf "$dir"' EXIT
"$python" -m venv "$dir/venv"
packages=$("$dir/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$packages/project.pth"
"$dir/venv/bin/pip" install -q "ray[train]==2.60.0"
export PYTHONUNBUFFERED=1
PATH=$dir/venv/bin:$(dirname "$python"):$PATH "$dir/venv/bin/python" "$here/ray_train.py" "$@"
