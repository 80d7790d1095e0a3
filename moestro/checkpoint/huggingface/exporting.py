"""The weights of a checkpoint as safetensors: as a model of a family that Hugging Face knows, or under our names."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from moestro.checkpoint.convert import new_folder, sound_source
from moestro.checkpoint.huggingface.architecture import differences
from moestro.checkpoint.huggingface.families import FAMILIES
from moestro.checkpoint.huggingface.files import NewTensor, shard_names, write_file, write_index
from moestro.checkpoint.huggingface.mapping import SAME, Entry, entries, shapes, whole_entry
from moestro.checkpoint.huggingface.settings import Settings
from moestro.checkpoint.manifest import progress_of
from moestro.checkpoint.read import read_box, tensors_in
from moestro.config import ModelConfig, load_config
from moestro.errors import MoestroError

Advance = Callable[[int], None]  # is told of bytes done
PREFIX = "model."
LAYOUTS = ("per-expert", "fused")


class EndOfText(NamedTuple):
    token: str
    id: int


class Export(NamedTuple):
    """How to write: numbers as they are stored when dtype is None, files of max_shard_bytes."""

    dtype: torch.dtype | None = None
    max_shard_bytes: int = 5 << 30
    layout: str | None = None  # None: as the family's released checkpoints are


def family_of(model: ModelConfig) -> tuple[str | None, str]:
    """The family whose architecture this is; or None, and what stands in the way of the nearest one."""
    nearest: tuple[int, str, list[str]] | None = None
    for name, family in FAMILIES.items():
        written = family.write(model)
        if written is None:
            continue
        try:
            found = differences(model, ModelConfig.model_validate(family.read(Settings(written, name))))
        except (MoestroError, ValidationError):
            continue
        if not found:
            return name, ""
        if nearest is None or len(found) < nearest[0]:
            nearest = (len(found), name, found)
    if nearest is None:
        return None, "no family has this combination of attention and feed-forward"
    more = f" and {len(nearest[2]) - 4} more" if len(nearest[2]) > 4 else ""
    return None, f"the nearest, {nearest[1]}, has no {', '.join(nearest[2][:4])}{more}"


def known_model(checkpoint: Path) -> tuple[ModelConfig | None, str]:
    """The model of a run's checkpoint if a family has it; else None, and why not."""
    try:
        config = load_config(str(checkpoint.parent.parent / "config.toml")).config
        model = config.as_of(progress_of(checkpoint).step).model
    except MoestroError as error:  # no run around the checkpoint, or one of an older version
        return None, str(error).splitlines()[0]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # as read_manifest says
        return None, f"its manifest is damaged: {error}"
    family, why_not = family_of(model)
    return (None, why_not) if family is None else (model, "")


def export_family(
    source: Path,
    destination: Path,
    model: ModelConfig,
    end_of_text: EndOfText,
    how: Export,
    advance: Advance,
) -> list[Path]:
    """Write a folder that Hugging Face's `from_pretrained` and its like load, one expert in memory at a time.

    model, end_of_text: of the run that `source` is a checkpoint of. The selection bias of a router is written in fp32
    always. Returns the files.

    Raises:
        MoestroError: no family has the model, the layout is not one of the family's, the checkpoint is damaged or not
            one of this model, or the destination is there.
    """
    name, why_not = family_of(model)
    if name is None:
        raise MoestroError(f"no family of models that Hugging Face knows is this one: {why_not}. Use --format moestro")
    family = FAMILIES[name]
    layout = how.layout or next(iter(family.layouts))
    if layout not in family.layouts:
        raise MoestroError(
            f"{name} has no layout {layout}; it has {', '.join(k for k in family.layouts if k in LAYOUTS)}"
        )
    metadata, ours = sound_source(source), shapes(model)
    _check_fit(source, metadata, ours)
    found = entries(model, family.layouts[layout], ours)
    run = source.parent.parent
    with new_folder(destination) as folder:
        dtype = _write_weights(source, metadata, folder, found, how, advance)
        ids: dict[str, Any] = {"bos_token_id": end_of_text.id, "eos_token_id": end_of_text.id, "pad_token_id": None}
        if (run / "generation_config.json").is_file():
            known = json.loads((run / "generation_config.json").read_text(encoding="utf-8"))
            ids |= {key: known[key] for key in ids if key in known}
        kind = {"architectures": [family.architecture], "model_type": name, "torch_dtype": dtype}
        _write_json(folder / "config.json", kind | (family.write(model) or {}) | ids)
        _write_side_files(run, folder, model, end_of_text, ids)
    return sorted(destination.iterdir())


def export_plain(source: Path, destination: Path, how: Export, advance: Advance) -> list[Path]:
    """Write the model's tensors under their own names, with the run's config.toml and tokenizer. Returns the files.

    Raises:
        MoestroError: the source is damaged, or the destination is there.
    """
    metadata = sound_source(source)
    found = []
    for stored_name, stored in tensors_in(metadata).items():
        if stored_name.startswith(PREFIX):
            found += _rows(stored_name.removeprefix(PREFIX), tuple(stored.size))
    with new_folder(destination) as folder:
        _write_weights(source, metadata, folder, found, how, advance)
        for name in ("config.toml", "tokenizer.json"):
            if (source.parent.parent / name).is_file():
                shutil.copyfile(source.parent.parent / name, folder / name)
    return sorted(destination.iterdir())


def _rows(name: str, shape: tuple[int, ...]) -> list[Entry]:
    """Tensors of many axes, which are the large ones, by elements of the first."""
    if len(shape) < 3:
        return [whole_entry(name, shape, name)]
    codec = SAME._replace(write=lambda box: [box[0]])
    return [
        Entry(name, (row, *(0,) * (len(shape) - 1)), (1, *shape[1:]), (name,), codec, row) for row in range(shape[0])
    ]


def _check_fit(source: Path, metadata: Metadata, ours: dict[str, Tensor]) -> None:
    stored = {name.removeprefix(PREFIX): t for name, t in tensors_in(metadata).items() if name.startswith(PREFIX)}
    for name in sorted(stored.keys() | ours.keys()):
        if name not in stored or name not in ours or tuple(stored[name].size) != tuple(ours[name].shape):
            raise MoestroError(f"checkpoint {source} is not of the model in its run's config.toml: {name} differs")


def _write_weights(
    source: Path, metadata: Metadata, folder: Path, found: list[Entry], how: Export, advance: Advance
) -> str:
    """Write the entries' tensors in files. Returns the type that most of the numbers have."""
    stored = {name.removeprefix(PREFIX): t.properties.dtype for name, t in tensors_in(metadata).items()}

    def dtype_of(name: str) -> torch.dtype:
        if how.dtype is None or not stored[name].is_floating_point:
            return stored[name]
        return torch.float32 if name.endswith(".router.bias") else how.dtype

    def values(groups: Sequence[Sequence[Entry]]) -> Iterator[Tensor]:
        for entry in (entry for group in groups for entry in group):
            assert entry.codec.write is not None
            box = read_box(source, metadata, PREFIX + entry.name, entry.start, entry.size)
            advance(box.nbytes)
            yield from (part.to(dtype_of(entry.name)) for part in entry.codec.write(box))

    groups = [list(group) for _, group in groupby(found, key=lambda entry: entry.keys)]
    shards: list[list[list[Entry]]] = [[]]
    tensors: list[list[NewTensor]] = [[]]
    for group in groups:
        new = _new_tensors(group, dtype_of(group[0].name))
        if tensors[-1] and sum(t.bytes for t in (*tensors[-1], *new)) > how.max_shard_bytes:
            shards.append([])
            tensors.append([])
        shards[-1].append(group)
        tensors[-1] += new
    for name, shard, new in zip(shard_names(len(shards)), shards, tensors, strict=True):
        write_file(folder / name, new, values(shard))
    write_index(folder, tensors)
    sizes: dict[torch.dtype, int] = {}
    for tensor in (tensor for shard in tensors for tensor in shard):
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.bytes
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")


def _new_tensors(group: Sequence[Entry], dtype: torch.dtype) -> list[NewTensor]:
    """Their tensors that a group of entries with the same keys makes."""
    first = group[0]
    assert first.codec.write is not None
    parts = first.codec.write(torch.empty(first.size, device="meta"))
    rows = () if first.row is None else (len(group),)
    return [NewTensor(key, dtype, (*rows, *part.shape)) for key, part in zip(first.keys, parts, strict=True)]


def _write_side_files(run: Path, folder: Path, model: ModelConfig, end_of_text: EndOfText, ids: dict[str, Any]) -> None:
    """The tokenizer, and what else a reader expects beside it: as it was imported, or what we know."""
    shutil.copyfile(run / "tokenizer.json", folder / "tokenizer.json")
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text.token,
        "eos_token": end_of_text.token,
        "model_max_length": model.max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    for name, values in (("tokenizer_config.json", tokenizer), ("generation_config.json", ids)):
        if (run / name).is_file():
            shutil.copyfile(run / name, folder / name)
        else:
            _write_json(folder / name, values)
    if (run / "chat_template.jinja").is_file():
        shutil.copyfile(run / "chat_template.jinja", folder / "chat_template.jinja")


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
