#!/usr/bin/env bash
# Check job.yaml and trainjob.yaml against the schemas of Kubernetes and of Kubeflow's trainer. Nothing runs them.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
dir=$(mktemp -d /tmp/kubernetes.XXXXXX)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0
"$dir/venv/bin/kubernetes-validate" --strict --kubernetes-version 1.37 "$here/job.yaml"
"$dir/venv/bin/python" - "$here/trainjob.yaml" <<'CHECK'
import sys

import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob as TrainJob

given = yaml.safe_load(open(sys.argv[1]))
kept = TrainJob.from_dict(given).to_dict()
assert kept == given, f"not in the schema of a TrainJob: {kept} of {given}"
print("trainjob.yaml is a TrainJob")
CHECK
