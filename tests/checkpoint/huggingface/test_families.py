"""Models of transformers come in, compute the same, and go out the same to the last bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moestro.checkpoint.huggingface.architecture import differences
from moestro.checkpoint.huggingface.families import FAMILIES as KNOWN
from moestro.checkpoint.huggingface.importing import import_run, open_source
from moestro.checkpoint.huggingface.mapping import entries, shapes
from moestro.model.loss import linear_cross_entropy
from moestro.serve.load import load_run

from .models import FAMILIES, Made, error, export, some_ids, transformers


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_logits_and_gradients(self, made: Made, family: str) -> None:
        theirs, run = made.model(family), made.loaded(family)
        ids = some_ids()
        hidden = run.model(ids).hidden
        logits = theirs(input_ids=ids).logits
        assert error(run.model.logits(hidden), logits) < 1e-5
        linear_cross_entropy(hidden[:, :-1], run.model.head_weight, ids[:, 1:], 1 / 22).backward()
        theirs.zero_grad()
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        mine, others = dict(run.model.named_parameters()), dict(theirs.named_parameters())
        layout = KNOWN[family].layouts.get("fused", next(iter(KNOWN[family].layouts.values())))
        for entry in entries(run.config.model, layout, shapes(run.config.model)):
            if entry.name not in mine:
                continue
            # What rearranges weights rearranges their gradients.
            grads = [
                none_as_zero(others[key]) if entry.row is None else others[key].grad[entry.row] for key in entry.keys
            ]
            box = tuple(slice(first, first + size) for first, size in zip(entry.start, entry.size, strict=True))
            found = none_as_zero(mine[entry.name])[box]
            scale = none_as_zero(mine[entry.name]).abs().max().clamp_min(1e-30)
            assert float((found - entry.codec.read(grads)).abs().max() / scale) < 1e-5, entry.name

    def test_they_load_what_we_write(self, made: Made, family: str, tmp_path: Path) -> None:
        ids, expected = some_ids(), made.model(family)
        values = expected.state_dict()
        written = sorted(load_file(made.folder(family) / "model.safetensors"))
        layouts = [name for name in KNOWN[family].layouts if name in ("per-expert", "fused")]
        for layout in layouts:
            out = export(made.run(family), tmp_path / layout, layout=layout, max_shard_bytes=6000)
            index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
            if layout == layouts[0]:
                assert sorted(index) == written
            loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
                out, output_loading_info=True, attn_implementation="eager"
            )
            assert not any(info.values()), info
            assert all(torch.equal(value, values[name]) for name, value in loaded.state_dict().items())
            assert error(loaded.eval()(input_ids=ids).logits, expected(input_ids=ids).logits) < 1e-6
            again = tmp_path / f"{layout}-run"
            import_run(open_source(out), again, lambda count: None)
            first, second = made.loaded(family), load_run(again, "cpu")
            assert differences(first.config.model, second.config.model) == []
            back = second.model.state_dict()
            assert all(torch.equal(back[name], value) for name, value in first.model.state_dict().items())

    def test_decoding_with_a_cache(self, made: Made, family: str) -> None:
        model, both = made.loaded(family).model, family in ("mixtral", "deepseek_v3")
        sequence, new = some_ids(1, 5), 256 if both else 48
        with torch.inference_mode():
            cache = model.new_cache(1, 5 + new, torch.device("cpu"), torch.float32)
            inputs = sequence
            for _ in range(new):
                inputs = model.logits(model(inputs, cache=cache).hidden[:, -1]).argmax(-1, keepdim=True)
                sequence = torch.cat((sequence, inputs), 1)
            again = model.logits(model(sequence[:, :-1]).hidden).argmax(-1)
        assert torch.equal(again[:, 4:], sequence[:, 5:])
        if both:
            arguments = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None}
            theirs = made.model(family).generate(sequence[:, :5], attention_mask=torch.ones(1, 5), **arguments)
            assert torch.equal(theirs, sequence[:, : 5 + 64])


def none_as_zero(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
