#!/usr/bin/env bash
# cut_text.sh FROM TO: cut the text model out of a checkpoint that can read pictures too; FROM is a hub id or a folder
set -euo pipefail
exec python - "${1:?usage: cut_text.sh FROM TO; FROM: a hub id or a folder}" "${2:?usage: cut_text.sh FROM TO; TO: a folder}" <<'EOF_PYTHON'
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
