"""Scoring with a model sharded over two processes that hold different numbers of rows."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small_models import tiny

from memcalib.inference.sampling import group_sync, sample_tokens
from memcalib.trainer.distillation import teacher_logps
from memcalib.credit.divergences import token_divergences
from memcalib.credit.prefix_groups import sharing_faults
from memcalib.credit.logprobs import response_logps, response_logps_reference
from memcalib.credit.tree_attention import tree_logps, trees_agree


def rows(rank: int):
    """Many rows for the first process, two for the second, none at all in the second round."""
    g = torch.Generator().manual_seed(rank)

    def word(n):
        return torch.randint(1, 50, (n,), generator=g).tolist()

    stem = word(12)
    count = 9 if rank == 0 else 2
    return [stem[:8] + word(3 + k % 3) for k in range(count)], [word(4 + k) for k in range(count)]


def process(rank: int, port: int, queue) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from trl.trainer.utils import add_fused_lm_head

        mesh = init_device_mesh("cpu", (2,))
        model = tiny()
        whole = tiny()
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        differences = {"synced": group_sync(model) is not None}
        prompts, responses = rows(rank)
        expected = response_logps_reference(whole, prompts, responses)
        for share in (None, False):
            out = response_logps(model, prompts, responses, token_budget=30, share=share)
            differences[f"share {share}"] = (out - expected).abs().max().item()
        out = response_logps(model, *(rows(rank) if rank == 0 else ([], [])), token_budget=20)
        differences["nothing to do"] = (
            (out - expected).abs().max().item() if rank == 0 else out.numel()
        )
        without = [prompt[:2] + prompt[3:] for prompt in prompts]
        for held in (
            2**27,
            600,
        ):  # at once, and in turns of which the processes have not equally many
            both = [
                token_divergences(each, prompts, without, responses, held=held)
                for each in (model, whole)
            ]
            differences[f"divergences {held}"] = (both[0] - both[1]).abs().max().item()
        out = token_divergences(
            model, *((prompts, without, responses) if rank == 0 else ([], [], []))
        )
        differences["no divergences"] = (
            (out - both[1]).abs().max().item() if rank == 0 else out.numel()
        )
        lessons = [
            teacher_logps(each, prompts, responses, 4, token_budget=30) for each in (model, whole)
        ]
        differences["lesson"] = max(
            (a - b).abs().max().item() for a, b in zip(*lessons, strict=True)
        )
        limits = [3 + rank * 4 + k for k in range(len(prompts))]
        sampled = [
            sample_tokens(each, prompts, ends=[0], max_tokens=limits, temperature=0)
            for each in (model, whole)
        ]
        differences["sampled"] = float(
            sampled[0] != sampled[1] or list(map(len, sampled[0])) != limits
        )
        differences["agrees"] = trees_agree(model, prompts, responses, fused=model)
        logps, _ = tree_logps(model, prompts, responses, grad=True, entropy=True, fused=model)
        differences["trees"] = (logps - expected).abs().max().item()
        logps.sum().backward()
        grad = model.model.layers[0].mlp.up_proj.weight.grad.full_tensor()
        tree_logps(
            whole, *(list(a) + list(b) for a, b in zip(rows(0), rows(1), strict=True)), grad=True
        )[0].sum().backward()
        mean = whole.model.layers[0].mlp.up_proj.weight.grad / 2
        differences["gradient"] = ((grad - mean).norm() / mean.norm()).item()
        queue.put((rank, differences | {"faults": sharing_faults(model)}))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_score_with_one_sharded_model():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    workers = [context.Process(target=process, args=(rank, port, queue)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
        worker.kill()
        assert worker.exitcode == 0
    for differences in dict(queue.get() for _ in workers).values():
        assert differences.pop("synced") and differences.pop("agrees")
        assert differences.pop("faults") == {"cache": "", "tree": ""}
        assert max(differences.values()) < 1e-4, differences
