"""Judgments made by hand and at random, shared by the tests of metrics and breakdowns."""

from hypothesis import strategies as st

from memcalib.problem import Judgment

levels = st.sampled_from([0, 1, 2])


def make(ideal, actual, example="e1", question=None, **fields):
    """A judgment of an example with these ideal and actual levels, one of each for an atom."""
    atoms = []
    for k, (ideal_level, actual_level) in enumerate(zip(ideal, actual, strict=True), 1):
        atoms.append(
            {
                "atom_id": f"p{k}_a1",
                "ideal": ideal_level,
                "actual": actual_level,
                "parent_memory_id": f"b{k % 2}",
            }
        )
    judgment_fields = {
        "example_id": example,
        "domain": "health",
        "question_id": question or example,
        "model": "m",
        "atoms": atoms,
    }
    judgment_fields.update(fields)
    return Judgment(**judgment_fields)


@st.composite
def judgment_lists(draw, unscored=True):
    """Judgments of one to six examples, in two domains, each under one to three seeds."""
    actual_levels = st.one_of(levels, st.none()) if unscored else levels
    judgments = []
    for k in range(draw(st.integers(1, 6))):
        domain = "coding" if k % 2 else "health"
        ideal = draw(st.lists(levels, min_size=1, max_size=6))
        for seed in range(draw(st.integers(1, 3))):
            size = len(ideal)
            actual = draw(st.lists(actual_levels, min_size=size, max_size=size))
            judgments.append(make(ideal, actual, f"e{k}", f"q{k // 2}", seed=seed, domain=domain))
    return judgments
