"""Cut the text model out of a Ministral 3 checkpoint, which can read pictures too: `python text_only.py FROM TO`."""

import sys

from transformers import AutoModelForImageTextToText, AutoTokenizer, Ministral3ForCausalLM


def text_only(source: str, target: str) -> None:
    """Save the language model of `source` with its tokenizer, in the precision it has; weights in 8 bits are refused."""
    whole = AutoModelForImageTextToText.from_pretrained(source, dtype="auto")
    if getattr(whole.config, "quantization_config", None):
        sys.exit(f"{source}: its weights are quantized and cannot be trained; take the checkpoint whose name ends in -BF16")
    text = Ministral3ForCausalLM(whole.config.text_config).to(whole.dtype)
    text.model, text.lm_head = whole.model.language_model, whole.lm_head
    text.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


if __name__ == "__main__":
    text_only(*sys.argv[1:3])
