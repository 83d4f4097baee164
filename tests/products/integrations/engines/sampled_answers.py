"""The batch that an engine's tests work on: two records of the micro-world, four answers to each,
sampled from its policy.
"""

import torch

from memcalib.inference.sampling import prompt_encoder, sample_tokens
from memcalib.products.micro.policy import load_policy
from memcalib.products.micro.world import make_examples

torch.set_num_threads(1)
POLICY, TOKENIZER = load_policy("cold-short")
EXAMPLES = make_examples("short", 2, seed=4)
ENCODE = prompt_encoder(TOKENIZER, prompt_template="micro")
ASKED = [example for example in EXAMPLES for _ in range(4)]  # the record of each answer
torch.manual_seed(0)
IDS = sample_tokens(
    POLICY, [ENCODE(example) for example in ASKED], ends=[TOKENIZER.eos_token_id], max_tokens=40
)
TEXTS = [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in IDS]
