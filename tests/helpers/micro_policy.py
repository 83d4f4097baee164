"""The tokenizer, the eight examples and the policy with which most tests train."""

from memcalib.products.micro.world import make_examples
from memcalib.products.micro.policy import build_tokenizer, load_policy

TOKENIZER = build_tokenizer()
EXAMPLES = make_examples("short", 8, seed=5)


def policy():
    """A policy that has learnt some of its task."""
    return load_policy("cold-short")[0]
