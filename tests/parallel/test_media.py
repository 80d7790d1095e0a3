"""Encoders and mixtures of depths over ranks: the same as in one process, also where a rank has no image at all."""

from pathlib import Path
from typing import Any

import torch
from distributed import run_ranks

from moestro.config import Config
from moestro.data.batches import IGNORE, Batch
from moestro.model.media import Media, placeholder
from moestro.optim.update import Update
from moestro.train.step import train_step
from parallel.cases import BATCH, global_batch, make_config
from parallel.test_equal import figures, is_moment, trainer, unlike

ENCODER = {"name": "image", "input_size": 6, "max_patches": 4, "hidden_size": 8, "num_layers": 1, "num_tokens": 4}
MODELS: dict[str, dict[str, Any]] = {
    "depth": {"depth": {"capacity": 0.5, "every_n_layers": 2}},
    "encoders": {"encoders": [ENCODER | {"connector": "c_abstractor"}, ENCODER | {"name": "other"}]},
}
LAYOUTS: list[dict[str, Any]] = [{"pp": 2}, {"fsdp": 2, "ep": 2, "dispatch": "all_gather"}]


def config_of(model: str, parallel: dict[str, Any]) -> Config:
    plain = make_config("lagged", "adamw", parallel=parallel, train={"recompute": "block"}).model_dump()
    return Config.model_validate(plain | {"model": plain["model"] | MODELS[model]})


def batch_of(model: str, step: int) -> tuple[Batch, list[list[Media]]]:
    """Rows, of which the first half begin with an image, and the first has one for the other encoder too; and the
    images of each row."""
    batch, media = global_batch(step), [list[Media]() for _ in range(BATCH)]
    for row in range(BATCH // 2 if model == "encoders" else 0):
        for encoder in range(2 if row == 0 else 1):
            place = 1 + 5 * encoder
            batch.input_ids[row, place : place + 4] = placeholder(encoder)
            batch.labels[row, place - 1 : place + 3] = IGNORE
            generator = torch.Generator().manual_seed(step * BATCH + row)
            media[row].append(Media(encoder, torch.randn(1, 4, 6, generator=generator), torch.tensor([4])))
    return batch, media


def together(media: list[list[Media]]) -> tuple[Media, ...]:
    """Those of several rows, by encoder."""
    found = []
    for encoder in range(2):
        items = [m for row in media for m in row if m.encoder == encoder]
        if items:
            found.append(Media(encoder, torch.cat([m.patches for m in items]), torch.cat([m.numbers for m in items])))
    return tuple(found)


def run(config: Config, model: str, world_size: int) -> tuple[dict[str, Any], Update]:
    """Figures of one step, and the optimizer after it, whose first moments are the clipped gradients, scaled."""
    engine, update = trainer(config, world_size)
    layout, place = engine.mesh.layout, engine.mesh.place
    whole, media = batch_of(model, step=0)
    size, parts = layout.micro_batch_size, []
    first = place.batch * size * layout.micro_batches
    for i in range(first, first + size * layout.micro_batches, size):
        rows = slice(i, i + size)
        tensors = {name: value[rows] for name, value in vars(whole).items() if name != "media"}
        parts.append(Batch(**tensors, media=together(media[rows])))
    result = train_step(engine, update, parts, grad_clip=0.5)
    return figures(result) | {"other_loss": float(result.other_loss)}, update


def check(rank: int, references: dict[str, tuple[dict[str, Any], str]]) -> None:
    for model, (expected, file) in references.items():
        for layout in LAYOUTS:
            found, update = run(config_of(model, layout), model, 2)
            where = f"{model}, {layout}: "
            assert not unlike(update, torch.load(file), where)
            for name, value in expected.items():
                close = torch.allclose(torch.as_tensor(found[name]), torch.as_tensor(value), rtol=1e-5, atol=1e-6)
                assert close, f"{where}{name} is {found[name]} instead of {value}"


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    references = {}
    for model in MODELS:
        expected, update = run(config_of(model, {}), model, 1)
        moments = {n: t.chunks[0].tensor.clone() for n, t in update.state().items() if is_moment(n)}
        torch.save(moments, tmp_path / model)
        references[model] = expected, str(tmp_path / model)
    assert references["depth"][0]["other_loss"] > 0
    run_ranks(check, 2, references)
