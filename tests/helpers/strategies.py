"""Judgments made by hand and at random, shared by the tests of metrics and breakdowns."""

from hypothesis import strategies as st

from memcalib.problem import Judgment

levels = st.sampled_from([0, 1, 2])


def make(ideal, actual, example="e1", question=None, **fields):
    atoms = [
        {"atom_id": f"p{k}_a1", "ideal": i, "actual": a, "parent_memory_id": f"b{k % 2}"}
        for k, (i, a) in enumerate(zip(ideal, actual, strict=True), 1)
    ]
    head = {
        "example_id": example,
        "domain": "health",
        "question_id": question or example,
        "model": "m",
    }
    return Judgment(**(head | fields), atoms=atoms)


@st.composite
def judgment_lists(draw, unscored=True):
    actual = st.one_of(levels, st.none()) if unscored else levels
    out = []
    for k in range(draw(st.integers(1, 6))):
        ideal = draw(st.lists(levels, min_size=1, max_size=6))
        for seed in range(draw(st.integers(1, 3))):
            got = draw(st.lists(actual, min_size=len(ideal), max_size=len(ideal)))
            out.append(
                make(
                    ideal, got, f"e{k}", f"q{k // 2}", seed=seed, domain=("health", "coding")[k % 2]
                )
            )
    return out
