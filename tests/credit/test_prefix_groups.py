"""Faults of ways of sharing: what several processes make of them,
and models that draw at random as they train.
"""

import pytest
import torch
from small_models import a_workload, tiny

from memcalib.credit.prefix_groups import UNDECIDED, sharing_fault, sharing_faults
from memcalib.credit.tree_attention import trees_agree

FAULT = "it differs from the plain computation by 0.2 nats on a sample of the rows"


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [
        ("", "", ""),
        ("", FAULT, FAULT),
        (FAULT, "", FAULT),
        (UNDECIDED, FAULT, FAULT),
        (UNDECIDED, "", ""),
        ("", UNDECIDED, ""),
        (UNDECIDED, UNDECIDED, UNDECIDED),
    ],
)
def test_a_fault_on_one_process_is_a_fault_on_all(monkeypatch, ours, theirs, agreed):
    """Else some would pack their rows into trees and others not,
    and wait for each other for ever.
    """

    def gather(everyone, own_fault):
        everyone[:] = [own_fault, theirs]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    model = tiny()
    sample = torch.zeros(0 if ours == UNDECIDED else 1)
    checks = lambda: ours if ours == FAULT else "", lambda: (sample, sample)
    assert sharing_fault(model, "alone", *checks) == ours, (
        "not together: the other process is not asked"
    )
    assert sharing_fault(model, "tree", *checks, together=True) == agreed
    assert sharing_faults(model).get("tree", UNDECIDED) == agreed


def test_a_model_with_dropout_is_compared_as_it_scores():
    torch.manual_seed(0)
    model = tiny(attention_dropout=0.5).train()
    assert trees_agree(model, *a_workload(3)) and model.training
    assert sharing_faults(model) == {"tree": ""}
