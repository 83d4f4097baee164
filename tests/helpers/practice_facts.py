"""Facts and requests of the micro-world for hypothesis, and bounds on a count with a known rate."""

import math
from itertools import chain

from hypothesis import strategies as st

from memcalib.products.micro.world import OWNERS, REQUESTS, SCOPES, WORDS
from memcalib.products.micro.practice.source import ATTRIBUTES, DOMAIN_OF, Fact, MicroRequest

ATTRIBUTES_WITH_NOUNS = [
    (attribute, noun)
    for attribute, domain in ATTRIBUTES.items()
    for noun in WORDS[domain][attribute]
]
NOUNS_OF_REQUESTS = [("", noun) for noun in chain.from_iterable(REQUESTS.values())]


@st.composite
def every_fact(draw) -> Fact:
    """Any fact that can be stated."""
    owner = draw(st.sampled_from(("user", *OWNERS)))
    attribute, noun = draw(st.sampled_from(ATTRIBUTES_WITH_NOUNS + NOUNS_OF_REQUESTS))
    past = draw(st.booleans())
    occasion = draw(st.sampled_from(("", *SCOPES)))
    return Fact(owner, attribute, noun, past, occasion)


@st.composite
def every_request(draw) -> MicroRequest:
    """Any request, with at most four things."""
    task = draw(st.sampled_from(sorted(DOMAIN_OF)))
    scope = draw(st.sampled_from(SCOPES))
    rng = draw(st.randoms(use_true_random=False))
    count = draw(st.integers(0, 4))
    return MicroRequest(task, scope, tuple(rng.sample(REQUESTS[task], count)))


def bounds(count: int, rate: float, width: float = 4.5) -> tuple[float, float]:
    """Between what a binomial count lies, but for one time in a hundred thousand."""
    slack = width * math.sqrt(count * rate * (1 - rate))
    return count * rate - slack, count * rate + slack
