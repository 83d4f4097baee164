"""Small untrained models of any architecture of transformers, and rows to score with them."""

import random

import torch

SIZES = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=256,
)
LINEAR = dict(
    head_dim=16,
    linear_num_value_heads=2,
    linear_num_key_heads=1,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
    mlp_only_layers=[0, 1],
    num_experts=2,
    num_experts_per_tok=1,
)
WINDOWS = dict(head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
OTHERS = {  # architectures that cannot share: class, options, words of the reason
    "sliding window": ("Mistral", {"sliding_window": 6}, "SlidingWindowLayer"),
    "some layers with a window": ("Gemma3", WINDOWS, "SlidingWindowLayer"),
    "linear attention": ("Qwen3Next", LINEAR, "LinearAttention"),
    "recurrent": ("Mamba", {"state_size": 4}, "not plain keys and values"),
    "no position ids": ("Bloom", {"n_head": 2, "n_layer": 2}, "positions"),
}


def random_lora():
    """Settings of adapters of rank 4 on every linear layer that change the model from the start."""
    from peft import LoraConfig

    return LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )


def tiny(kind="Qwen3", **options):
    """A model of two layers; the micro-world's architecture by default."""
    import transformers

    torch.manual_seed(2)
    config_name = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config_options = dict(SIZES)
    if kind == "Qwen3":
        config_options["head_dim"] = 16
    config_options.update(options)
    config = getattr(transformers, config_name)(**config_options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.eval()


def a_workload(seed, rows=12, empty=False, pool=5):
    """Prompts that share beginnings, some identical, some one token long; ragged answers."""
    rng = random.Random(seed)

    def tokens(count):
        return [rng.randrange(1, 50) for _ in range(count)]

    stems = [tokens(rng.randint(1, 12)) for _ in range(3)]
    distinct = [rng.choice(stems) + tokens(rng.randint(0, 9)) for _ in range(pool)]
    distinct.append(tokens(1))
    prompts = [list(rng.choice(distinct)) for _ in range(rows)]
    shortest = 0 if empty else 1
    answers = [tokens(rng.randint(shortest, 8)) for _ in range(rows)]
    return prompts, answers
