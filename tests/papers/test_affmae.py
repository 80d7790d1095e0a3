"""AFFMAE: the exact checks and that they can fail, how times are read, and the record."""

import pytest
import torch
from torch import Tensor

from moestro.graph.tokens import affmae
from papers import affmae as paper
from papers import affmae_model
from papers.affmae_model import Encoder, near_tokens, random_mask, visible_places
from papers.store import read_record

ROW = {"time": 1.4, "flops": 6.0, "roofline": 4.0, "ms plain": 14.0, "ms merging": 10.0}


@pytest.mark.parametrize(
    "check", [paper.check_counter, paper.check_whole, paper.check_hidden, paper.check_merging, paper.check_dense]
)
def test_holds(check) -> None:  # type: ignore[no-untyped-def]
    assert check().verdict == "holds"


def test_the_published_ratio_is_near_that_of_the_larger_share() -> None:
    check = paper.check_published()
    assert check.verdict == "holds in part"
    assert check.ours.startswith("9.3 and 7.3 times")


def test_masking_after_patches_are_made_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Encoder.patches
    monkeypatch.setattr(Encoder, "patches", lambda self, image, mask: leaky(honest, self, image, mask))

    def leaky(patches, self: Encoder, image: Tensor, mask: Tensor):  # type: ignore[no-untyped-def]
        monkeypatch.setattr(Tensor, "masked_fill", lambda x, *_: x)
        found = patches(self, image, mask)
        monkeypatch.undo()
        return found

    assert paper.check_hidden().verdict == "holds in part"


def test_attention_that_forgets_a_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(place: Tensor, cluster: int, near: int) -> tuple[Tensor, Tensor]:
        index, there = near_tokens(place, cluster, near)
        there[..., -1] = False
        return index, there

    monkeypatch.setattr(affmae_model, "near_tokens", short)
    assert paper.check_dense().verdict != "holds"


def test_a_wrong_number_of_merged_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "kept_tokens", lambda n, share: round(share * n))
    assert paper.check_merging().verdict != "holds"


def test_times() -> None:
    assert paper.check_time({128: ROW}).verdict == "holds"
    assert paper.check_time({128: {**ROW, "time": 7.0}}).verdict == "does not hold"
    assert paper.check_time({128: {**ROW, "roofline": 7.0}}).verdict == "holds in part"


def test_masks_hide_the_same_share_of_every_image() -> None:
    mask = random_mask(8, 0.5, 3, seed=1)
    assert mask.sum(1).tolist() == [32, 32, 32]
    seen = visible_places(mask, 8)
    assert seen.shape == (3, 32)
    assert not mask.gather(1, seen).any()


def test_near_tokens_are_the_nearest_clusters() -> None:
    place = torch.stack((torch.arange(20.0), torch.zeros(20)), -1)[None]
    index, there = near_tokens(place, cluster=4, near=2)
    assert sorted(index[0, 0].tolist()) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert there.all()
    _, there = near_tokens(place[:, :18], cluster=4, near=5)
    assert there.sum(-1).unique().tolist() == [18]


def test_an_encoder_has_the_sizes_of_its_levels() -> None:
    net = paper.small()
    out = Encoder(net, 8)(torch.randn(1, 1, 128, 128), paper.mask_of(net, 128, 1))
    assert out.x.shape == (1, net.levels[-1].tokens, 512)
    assert [level.tokens for level in affmae(128).levels] == [level.tokens for level in net.levels]


def test_the_record_has_all_checks() -> None:
    record = read_record("affmae")
    assert record is not None
    assert len(record.result.checks) == 8
    assert record.seconds < 600
