"""A rank that has some positions of each sequence routes them as one that has all, and the ranks' losses add up.

Ranks are acted out one after the other: what the whole run gathered, each part gets from its own gathering.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from moestro.model.moe.router import Router, Routing, TokenGroups

from ..helpers import normal
from .slow_selection import router_for
from .test_selection import RAW, ROUTERS

SEQ_LEN, SEQUENCES, WIDTH = 6, 2, 16
TYPES = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 1])
PARTS = (torch.tensor([0, 5, 2, 6, 11, 8]), torch.tensor([1, 3, 4, 7, 9, 10]))  # positions of each sequence alike


class Whole:
    parts, splits_attention = 1, False

    def __init__(self) -> None:
        self.gathered: list[Tensor] = []

    def gather(self, x: Tensor) -> Tensor:
        self.gathered.append(x.detach())
        return x.detach()

    def mine(self, x: Tensor) -> Tensor:
        return x

    def attend(self, *_: Any) -> Tensor:
        raise NotImplementedError


class Part(Whole):
    parts = 2

    def __init__(self, places: Tensor, gathered: list[Tensor]) -> None:
        self.places, self.gathered = places, list(gathered)

    def gather(self, x: Tensor) -> Tensor:
        whole = self.gathered.pop(0)
        torch.testing.assert_close(x.detach(), whole[self.places])
        return whole

    def mine(self, x: Tensor) -> Tensor:
        return x[self.places]


LOSSES = {"mi_coef": 0.1, "modality_prior_coef": 0.3, "modality_split_coef": 0.4}
MORE: list[dict[str, Any]] = [
    {"balance": {"bias_rule": "quantile", "aux_scope": "sequence"} | LOSSES},
    {"router": {"selection": "sam", "num_groups": 2}, "balance": LOSSES | {"alignment_coef": 0.2}},
    {"router": {"selection": "dense", "capacity_factor": 0.6} | RAW, "balance": {"aux_scope": "micro_batch"}},
    {"router": {"kind": "zaya", "hidden_size": 8, "noise": "gumbel", "noise_scale": 0.5}},
    {"router": {"kind": "hybrid", "hidden_size": 8, "noise_scale": 0.5}},
]


def routed(router: Router, x: Tensor, upstream: Tensor, **groups: Any) -> tuple[Routing, list[Tensor]]:
    router.zero_grad()
    routing, _ = router(x, TokenGroups(SEQ_LEN, noise_seeds=torch.tensor([3, 4]), **groups))
    stats = routing.stats
    loss = stats.aux_loss + 0.1 * stats.z_loss + stats.other_loss + (routing.weights * upstream).sum()
    if routing.input_weight is not None:
        loss = loss + routing.input_weight.square().sum()
    loss.backward()
    return routing, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in router.parameters()]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("settings", ROUTERS + MORE, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_parts_add_up_to_the_whole(settings: dict[str, Any], padded: bool) -> None:
    router = router_for({"num_experts": 6, "top_k": 2} | settings, layer=1, token_types=[20])
    router.global_load.copy_(normal(len(router.bias), seed=3).softmax(0))
    if router.mean_shares is not None:
        router.mean_shares.copy_(normal(2, len(router.bias), seed=4).flatten().softmax(0).view(2, -1))
    x = normal(SEQ_LEN * SEQUENCES, WIDTH, seed=1, dtype=torch.float64)
    valid = torch.tensor([True] * 4 + [False] * 2 + [True, False, True, True, True, True]) if padded else None
    recorder = Whole()
    places = router.moe.num_choices  # at most that many a token
    upstream = normal(SEQ_LEN * SEQUENCES, places, seed=2, dtype=torch.float64)
    groups = TokenGroups(SEQ_LEN, valid, torch.tensor([3, 4]), token_types=TYPES)
    alone = router(x, groups)[0]
    width = alone.weights.shape[1]
    whole, expected = routed(router, x, upstream[:, :width], valid=valid, shard=recorder, token_types=TYPES)
    assert torch.equal(whole.expert_ids, alone.expert_ids)
    totals = {name: torch.zeros_like(value) for name, value in vars(whole.stats).items()}
    grads = [torch.zeros_like(value) for value in expected]
    for part in PARTS:
        shard = Part(part, recorder.gathered)
        found, added = routed(
            router, x[part], upstream[part][:, :width], valid=valid, shard=shard, token_types=TYPES[part]
        )
        assert not shard.gathered
        assert torch.equal(found.expert_ids, whole.expert_ids[part])
        torch.testing.assert_close(found.weights, whole.weights[part])
        for name, value in vars(found.stats).items():
            totals[name] += value
        grads = [a + b for a, b in zip(grads, added, strict=True)]
    for name, value in vars(whole.stats).items():
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if name == "token_entropy" else {}
        torch.testing.assert_close(totals[name], value, **tolerance)
    torch.testing.assert_close(grads, expected)
