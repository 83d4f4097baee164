#!/usr/bin/env bash
# launch.sh FOLDER METHOD [more options of `memcalib train`]   METHOD: sft opsd-pg opsd-gkd grpo gdpo memcalib-rl
# launch.sh FOLDER serve                                       start the vLLM server for SAMPLER=server
#
# FOLDER is a folder with recipe.yaml, accelerate.yaml and deepspeed.json: a path, or the name of one beside this script.
# Its recipe says how many nodes and processes there are, and which weights a server begins with.
#
# Variables, all with defaults:
#   SAMPLER=colocate|server   vLLM on the training GPUs, or behind SERVER_URL [colocate]
#   SERVER_URL                where `launch.sh FOLDER serve` listens [http://localhost:8000]
#   SHARDING=fsdp2|zero3      accelerate.yaml, or deepspeed.json [fsdp2]
#   GPUS                      processes on each node, or GPUs of the server [the recipe's]
#   ACCUMULATE                parts of a mini-batch on each GPU [the recipe's]
#   JUDGE_URL                 the judge's address [the recipe's]
#   START                     weights that a server begins with [the recipe's start]
#   MACHINE_RANK, MAIN_ADDRESS, MAIN_PORT   for more than one node; in an allocation of SLURM found by itself
#   OUT                       folder of the run [runs/FOLDER/METHOD]
set -euo pipefail
beside="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
usage="usage: launch.sh FOLDER METHOD|serve [options]; folders here: $(cd "$beside" && for f in */; do printf '%s ' "${f%/}"; done)"
folder="${1:?$usage}" method="${2:?$usage}"
shift 2
[[ -f "$folder/recipe.yaml" ]] || folder="$beside/$folder"
[[ -f "$folder/recipe.yaml" ]] || { echo "launch.sh: no recipe.yaml in $folder; $usage" >&2 && exit 2; }
here="$(cd "$folder" && pwd)"
name="$(basename "$here")"
url="${SERVER_URL:-http://localhost:8000}"

said="$(
  python - "$here/recipe.yaml" <<'EOF_PYTHON'
import sys

from memcalib.io.settings import read_yaml

file = sys.argv[1]
try:
    recipe = read_yaml(file)
    launch, train = recipe.get("launch", {}), recipe.get("train", {})
    nodes, processes = launch.get("nodes", 1), launch.get("processes", 1)
    longest = train.get("max_prompt", 4096) + train.get("max_tokens", 2048)
    print(nodes, processes // nodes, train.get("trl", {}).get("vllm_tensor_parallel_size", 1), longest, recipe["start"]["model"])
except (ValueError, OSError) as error:
    sys.exit(f"launch.sh: {error}")
except (LookupError, TypeError, AttributeError, ArithmeticError):
    sys.exit(f"launch.sh: {file}: not a recipe; what is wrong with it: memcalib train {file} --dry-run")
EOF_PYTHON
)"
read -r nodes per_node server_gpus longest start <<<"$said"

if [[ "$method" == serve ]]; then
  export VLLM_SERVER_DEV_MODE=1 # opens the routes through which the trainer sends weights
  exec vllm serve "${START:-$start}" --port "${url##*:}" --tensor-parallel-size "${GPUS:-$server_gpus}" \
    --max-model-len "$longest" --weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs --max-logprobs -1 "$@"
fi

# In an allocation of SLURM this script starts itself once on each node.
if ((nodes > 1)) && [[ -n "${SLURM_JOB_ID:-}" && -z "${MACHINE_RANK:-}" ]]; then
  if [[ -z "${ON_EACH_NODE:-}" ]]; then
    MAIN_ADDRESS="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
    export MAIN_ADDRESS ON_EACH_NODE=1
    exec srun --nodes "$nodes" --ntasks-per-node 1 bash "${BASH_SOURCE[0]}" "$here" "$method" "$@"
  fi
  MACHINE_RANK="$SLURM_NODEID"
fi

processes=$((nodes * ${GPUS:-$per_node}))
out="${OUT:-runs/$name/$method}"
how=(--num_machines "$nodes" --num_processes "$processes")
if ((nodes > 1)); then
  how+=(--machine_rank "${MACHINE_RANK:?number of this node, from 0}" --main_process_ip "${MAIN_ADDRESS:?address of node 0}")
  how+=(--main_process_port "${MAIN_PORT:-29500}")
fi
case "${SHARDING:-fsdp2}" in
fsdp2) how+=(--config_file "$here/accelerate.yaml") ;;
zero3) how+=(--use_deepspeed --deepspeed_config_file "$here/deepspeed.json" --zero3_init_flag false) ;;
*) echo "SHARDING: found $SHARDING; allowed: fsdp2, zero3" >&2 && exit 2 ;;
esac

set_=(--set "launch.processes=$processes")
[[ -z "${ACCUMULATE:-}" ]] || set_+=(--set "$([[ "$method" == sft ]] && echo sft || echo train).accumulate=$ACCUMULATE")
[[ -z "${JUDGE_URL:-}" ]] || set_+=(--set "judge.base_url=$JUDGE_URL")
case "${SAMPLER:-colocate}" in
colocate) ;;
server) set_+=(--set train.trl.vllm_mode=server --set "train.trl.vllm_server_base_url=$url" --set train.trl.vllm_enable_sleep_mode=false) ;;
*) echo "SAMPLER: found $SAMPLER; allowed: colocate, server" >&2 && exit 2 ;;
esac

exec accelerate launch "${how[@]}" --module memcalib train "$here/recipe.yaml" --method "$method" --out "$out" "${set_[@]}" "$@"
