"""Bytes kept for backward: by published formulas, and by what autograd keeps of our own model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moestro.config import ModelConfig, load_config
from moestro.config.plan import Plan, Workload
from moestro.graph.convert import workload_of
from moestro.graph.count import count_step
from moestro.model.attention import cca, gqa, mla
from moestro.model.transformer import Transformer

TINY = (
    "deepseek-v3-tiny", "ds-moe-tiny", "gpt-oss-tiny", "mixtral-tiny", "mm1-tiny", "moma-tiny", "olmoe-tiny",
    "sotu-tiny", "switch-tiny", "telechat3-tiny", "uni-moe-tiny", "zaya1-tiny",
)  # fmt: skip


@pytest.mark.parametrize("heads", [(1, 8), (4, 8), (8, 64)])
def test_a_gpt_layer_keeps_what_korthikanti_et_al_count(heads: tuple[int, int]) -> None:
    """arXiv 2205.05198, equations 1, 2 and 4: sbh (34 + 5 a s / h) bytes, and its parts under tensor parallelism."""
    tp, a = heads
    s, b, h = 128, 2, 64 * 8
    model = ModelConfig(
        vocab_size=64, hidden_size=h, num_layers=1, num_heads=a, intermediate_size=4 * h, activation="gelu"
    )
    workload = Workload(model=model, seq_len=s, global_batch_size=b, attention_kernel="math", dropout=True)
    per_row = 4.0 * 2 * b * s  # of the two norms: a number for each row, which the formula leaves out

    def kept(plan: Plan) -> float:
        return count_step(workload, plan).stages[0].pieces[1].piece.saved

    sequence = kept(Plan(tp=tp, micro_batch_size=b)) - per_row / tp
    assert sequence == pytest.approx(s * b * h * (34 + 5 * a * s / h) / tp)
    plain = kept(Plan(tp=tp, micro_batch_size=b, sequence_parallel=False)) - per_row
    assert plain == pytest.approx(s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp)))
    selective = count_step(workload, Plan(tp=tp, micro_batch_size=b, recompute="selective")).stages[0]
    assert selective.saved.kept < sequence * 0.9


def test_a_layer_of_experts_keeps_its_token_copies() -> None:
    """MemFine's terms (arXiv 2511.21431): of each copy a row, gate, up, their product and the result."""
    model = load_config("mixtral-8x7b").config.model.model_copy(update={"vocab_size": 64})
    workload = Workload(model=model, seq_len=128, global_batch_size=1)
    more = model.model_copy(update={"moe": model.moe.model_copy(update={"top_k": 4})})  # type: ignore[union-attr]
    one, two = (
        count_step(w, Plan()).stages[0].pieces[1].piece.saved
        for w in (workload, workload.model_copy(update={"model": more}))
    )
    assert model.moe is not None
    width = model.moe.expert_hidden_size
    choice = 2 * 5  # bytes of weights and flags of a choice
    assert two - one == 128 * 2 * (2 * (2 * model.hidden_size + 3 * width)) + 128 * choice


class Flash(torch.autograd.Function):
    """Keeps what a flash kernel keeps, and lays its output out by tokens as it does. The values mean nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        out = query.new_zeros(batch, length, heads, value.shape[3]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, query.new_zeros(batch, heads, length))
        return out


def kept_by_autograd(model_config: ModelConfig, batch: int, seq: int, recompute: bool) -> int:
    """Bytes of the storages that the model's forward pass keeps, weights and buffers aside."""
    model = Transformer(model_config, recompute=recompute)
    model.init_weights(0)
    owned = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in owned:
            kept.setdefault(storage, tensor)
        return tensor

    ids = torch.randint(1, model_config.vocab_size or 0, (batch, seq))
    positions = torch.arange(seq).expand(batch, seq).contiguous()
    ahead = ids.expand(model_config.mtp.depth, batch, seq) if model_config.mtp else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(ids, positions, noise_seeds=torch.arange(batch), labels=ids, token_ids=ids, ahead=ahead)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's attention keeps copies that an accelerator's does not; the counts are of the latter."""
    for module in (cca, gqa, mla):
        monkeypatch.setattr(module, "attend", lambda q, k, v, _mask, scale=None, sinks=None: Flash.apply(q, k, v))


@pytest.mark.parametrize("name", TINY)
@pytest.mark.usefixtures("flash")
def test_our_model_keeps_what_is_counted(name: str) -> None:
    torch.manual_seed(0)
    batch, seq = 2, 128
    workload = workload_of(load_config(name, ["train.dtype=fp32"]).config)
    # A batch without images still passes an empty one through each encoder; keep those out of the comparison.
    model = workload.model
    if model.encoders and model.moe and model.moe.balance.modality_prior_coef == 0:
        model = model.model_copy(update={"encoders": ()})
    model = model.model_copy(update={"attention_sinks": False})  # the kernel above has no key for a sink
    shown = (1 / batch,) * len(model.encoders)
    workload = workload.model_copy(
        update={"model": model, "seq_len": seq, "global_batch_size": batch, "media_items": shown}
    )
    counted = count_step(workload, Plan(micro_batch_size=batch)).stages[0].saved.kept
    assert counted == pytest.approx(kept_by_autograd(model, batch, seq, recompute=False), rel=0.01)


@pytest.mark.parametrize("name", ["sotu-tiny", "deepseek-v3-tiny"])
@pytest.mark.usefixtures("flash")
def test_our_model_keeps_what_is_counted_when_it_recomputes(name: str) -> None:
    batch, seq = 2, 128
    workload = workload_of(load_config(name, ["train.dtype=fp32"]).config)
    workload = workload.model_copy(update={"seq_len": seq, "global_batch_size": batch})
    model = workload.model
    counted = count_step(workload, Plan(micro_batch_size=batch, recompute="block")).stages[0].saved.kept
    # Positions are arguments of the recomputed layers, and held as such.
    types = {model.layer_type(layer) for layer in range(model.num_layers)}
    tables = sum(4 * batch * seq * model.rotated_dims(model.rope_of(kind)) for kind in types)
    assert counted - tables == pytest.approx(kept_by_autograd(model, batch, seq, recompute=True), rel=0.01)
