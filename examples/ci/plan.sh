#!/usr/bin/env bash
# Profile the model for the larger machine without having it, and plan within the smaller budget.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
protrain profile model --on rtx-4090 --batch-size 2 --seq-len 1024 --dtype bfloat16 \
  -o plans/llama/profile.yaml
protrain plan plans/llama/profile.yaml --device-memory "${1:-2500MiB}" -o plans/llama/plan.yaml
