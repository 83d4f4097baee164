#!/usr/bin/env bash
# launch.sh METHOD [more options of `memcalib train`]   METHOD: sft opsd-pg opsd-gkd grpo gdpo memcalib-rl
# launch.sh serve                                       start the vLLM server for SAMPLER=server
# launch.sh text FROM TO                                cut the text model out of a checkpoint that can read pictures too
#
# Variables, all with defaults:
#   SAMPLER=colocate|server   vLLM on the training GPUs, or behind SERVER_URL [colocate]
#   SERVER_URL                where `launch.sh serve` listens [http://localhost:8000]
#   SHARDING=fsdp2|zero3      accelerate.yaml, or deepspeed.json [fsdp2]
#   GPUS                      processes on each node [PER_NODE below]
#   ACCUMULATE                parts of a mini-batch on each GPU [the recipe's]
#   JUDGE_URL                 the judge's address [the recipe's]
#   MACHINE_RANK, MAIN_ADDRESS, MAIN_PORT   for more than one node
#   OUT                       folder of the run [runs/NAME/METHOD]
set -euo pipefail
NAME=ministral-3-8b NODES=1 PER_NODE=8 SERVER_GPUS=2
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
method="${1:?usage: launch.sh METHOD|serve [options]}"
shift
url="${SERVER_URL:-http://localhost:8000}"

if [[ "$method" == serve ]]; then
  export VLLM_SERVER_DEV_MODE=1 # opens the routes through which the trainer sends weights
  exec vllm serve "${START:-runs/$NAME/sft/policy}" --port "${url##*:}" --tensor-parallel-size "${GPUS:-$SERVER_GPUS}" \
    --max-model-len 6144 --weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs --max-logprobs -1 "$@"
fi

if [[ "$method" == text ]]; then
  exec python - "${1:?FROM: a hub id or a folder}" "${2:?TO: a folder}" <<'EOF_PYTHON'
import sys

from transformers import AutoModelForImageTextToText, AutoTokenizer, Ministral3ForCausalLM

source, target = sys.argv[1:]
whole = AutoModelForImageTextToText.from_pretrained(source, dtype="auto")
if getattr(whole.config, "quantization_config", None):
    sys.exit(f"{source}: quantized weights cannot be trained; take the checkpoint whose name ends in -BF16")
text = Ministral3ForCausalLM(whole.config.text_config).to(whole.dtype)
text.model, text.lm_head = whole.model.language_model, whole.lm_head
text.save_pretrained(target)
AutoTokenizer.from_pretrained(source).save_pretrained(target)
EOF_PYTHON
fi

processes=$((NODES * ${GPUS:-$PER_NODE}))
out="${OUT:-runs/$NAME/$method}"
how=(--num_machines "$NODES" --num_processes "$processes")
if ((NODES > 1)); then
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
