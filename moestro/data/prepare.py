"""From a DataConfig to tokenized, split, memory-mapped data, cached by everything that determines it."""

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moestro.config import DataConfig, EncoderConfig, TokenizerConfig
from moestro.data.progress import Meter, track
from moestro.data.readers import BadRecords, Document
from moestro.data.shards import FORMAT_VERSION, Shard, ShardWriter, broken, write_json
from moestro.data.sources import Source, resolve_source, source_notice
from moestro.data.tokenizer import Tokenizer
from moestro.data.turns import SEGMENTS
from moestro.errors import MoestroError

Split = Literal["train", "validation"]

# Texts encoded in one call: enough to keep all cores busy, little enough to hold.
_ENCODE_CHARS = 4_000_000
# BPE merges settle long before this much text, and training reads about 2 MB/s.
_BPE_TRAINING_CHARS = 2**30
# Older unfinished folders belong to runs that were killed, not to a preparation still going on elsewhere.
_ABANDONED_AFTER_S = 24 * 3600


@dataclass(frozen=True)
class PreparedData:
    """The tokenizer, and for every source in the config's order a training and a validation shard."""

    folder: Path
    tokenizer: Tokenizer
    train: list[Shard]
    validation: list[Shard]
    notices: list[str]  # origin and licence of packaged sources, to be shown to the user
    skipped: dict[str, int]  # bad records left out, by reason

    @property
    def vocab_size(self) -> int:
        """How many token ids a model must know: the tokenizer's, and those that sources bring ready-made."""
        highest = max(shard.meta.get("highest_id", 0) for shard in (*self.train, *self.validation))
        return max(self.tokenizer.vocab_size, int(highest) + 1)


def prepare(config: DataConfig, progress: bool = True, encoders: tuple[EncoderConfig, ...] = ()) -> PreparedData:
    """Tokenize the sources, or reuse what an earlier call with the same text, tokenizer and split left in the cache.

    Safe to interrupt and to run from several processes at once: the data are built under a temporary name and renamed.
    A change of weights, sequence length or batch does not touch the cache.

    Raises:
        MoestroError: a source that cannot be found or read, a bad record (data.on_bad_record), too little text.
    """
    sources = [resolve_source(source, encoders) for source in config.sources]
    cache = Path(config.cache_dir).expanduser()
    folder = cache / f"data-{_cache_key(config, sources)}"
    if not folder.exists():
        _remove_abandoned(cache)
        temporary = cache / f"{folder.name}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            temporary.mkdir(parents=True)
            with track(progress) as meter:
                _build(config, sources, temporary, meter)
            _publish(temporary, folder)
        except OSError as error:
            raise MoestroError(
                f"cannot write prepared data to {cache}: {error}. Set data.cache_dir elsewhere"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return _open(folder, len(sources))


def split_documents(documents: Iterator[Document], holdout_every: int) -> Iterator[tuple[Split, Document]]:
    """Hold out every `holdout_every`-th document, counted in the source's order.

    A source with fewer documents than that gives its last one; a source with a single document gives its last
    1 / holdout_every, cut at a character. So there is always text of both kinds.
    """
    pending: Document | None = None
    count = 0
    for document in documents:
        if pending is not None:
            yield "validation" if count % holdout_every == 0 else "train", pending
        pending = document
        count += 1
    if pending is None:
        return
    if count > 1:
        last_is_held_out = count < holdout_every or count % holdout_every == 0
        yield "validation" if last_is_held_out else "train", pending
    elif len(pending.text) >= 2 and not pending.turns and not pending.media:
        cut = len(pending.text) - max(1, len(pending.text) // holdout_every)
        yield "train", Document(pending.text[:cut], pending.position)
        yield "validation", Document(pending.text[cut:], pending.position)


def _cache_key(config: DataConfig, sources: list[Source]) -> str:
    tokenizer: dict[str, Any] = config.tokenizer.model_dump()
    if config.tokenizer.path is not None:
        # The content, not the path: the same tokenizer elsewhere gives the same tokens.
        tokenizer["path"] = _load_tokenizer(config.tokenizer).fingerprint
    if config.tokenizer.kind != "bpe":
        del tokenizer["vocab_size"]
    content = {
        "format": FORMAT_VERSION,
        "sources": [{**_reading(source), **source.identity} for source in sources],
        "tokenizer": tokenizer,
        "holdout_every": config.holdout_every,
        "on_bad_record": config.on_bad_record,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _reading(source: Source) -> dict[str, Any]:
    """What of a source's settings decides about its tokens."""
    config, reading = source.config, dict[str, Any]()
    if config.format in ("text", "media"):
        reading["text_key"] = config.text_key
    if config.format != "text":
        reading["format"] = config.format
    if config.format == "media":
        keys = {"name", "input_size", "max_patches", "shape", "num_tokens"}
        reading["encoders"] = [encoder.model_dump(include=keys) for encoder in source.encoders]
    return reading


def _build(config: DataConfig, sources: list[Source], folder: Path, meter: Meter) -> None:
    tokenizer = _make_tokenizer(config, sources, meter)
    tokenizer.save(folder / "tokenizer.json")
    skipped: dict[str, int] = {}
    for index, source in enumerate(sources):
        bad = BadRecords(config.on_bad_record)
        documents = meter.watch(f"encode {source.config.path}", source.documents(bad), source.total())
        _encode_source(source, split_documents(documents, config.holdout_every), tokenizer, folder / str(index))
        _check_source(source, bad, folder / str(index))
        for reason, count in bad.counts.items():
            skipped[reason] = skipped.get(reason, 0) + count
    notices = list(dict.fromkeys(notice for s in sources if (notice := source_notice(s.config.path))))
    paths = [source.config.path for source in sources]
    write_json(folder / "meta.json", {"sources": paths, "notices": notices, "skipped": skipped})


def _make_tokenizer(config: DataConfig, sources: list[Source], meter: Meter) -> Tokenizer:
    if config.tokenizer.kind == "byte":
        return Tokenizer.byte()
    if config.tokenizer.kind == "file":
        return _load_tokenizer(config.tokenizer)
    return Tokenizer.train_bpe(_training_texts(config, sources, meter), config.tokenizer.vocab_size)


def _load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    return Tokenizer.load(Path(config.path or "").expanduser())


def _training_texts(config: DataConfig, sources: list[Source], meter: Meter) -> Iterator[str]:
    """Texts of the training split, an equal allowance for each source so that the first cannot crowd out the rest."""
    for source in sources:
        allowance = _BPE_TRAINING_CHARS // len(sources)
        # The encoding pass reads the same records again and does the counting.
        bad = BadRecords(config.on_bad_record)
        documents = meter.watch(f"tokenizer {source.config.path}", source.documents(bad), source.total())
        for split, document in split_documents(documents, config.holdout_every):
            if split == "train":
                yield document.text[:allowance]
                allowance -= len(document.text)
            if allowance <= 0:
                break


def _encode_source(
    source: Source, documents: Iterator[tuple[Split, Document]], tokenizer: Tokenizer, folder: Path
) -> None:
    meta: dict[str, Any] = {
        "source": source.config.path,
        "notice": source_notice(source.config.path),
        "tokenizer": tokenizer.fingerprint,
    }
    size, eot = tokenizer.vocab_size, tokenizer.eot_id
    encoders = source.encoders if source.config.format == "media" else ()
    if source.config.format == "tokens":
        size = 2**32  # what ids there may be, only the model knows
        meta |= {"highest_id": 0}
    with (
        ShardWriter(folder / "train", size, eot, meta, encoders) as train,
        ShardWriter(folder / "validation", size, eot, meta, encoders) as validation,
    ):
        writers = {"train": train, "validation": validation}
        for group in _grouped(documents):
            encoded = iter(tokenizer.encode_batch([s for _, document in group for s in document.segments]))
            for split, document in group:
                _write(writers[split], document, [next(encoded) for _ in document.segments])
                if document.ids is not None:
                    meta["highest_id"] = max(meta["highest_id"], int(document.ids.max()))


def _write(writer: ShardWriter, document: Document, parts: list[NDArray[np.uint32]]) -> None:
    """parts: the tokens of its segments."""
    size = len(document.text.encode())
    if document.ids is not None:
        writer.add(document.ids, document.ids.nbytes)
    elif document.media:
        writer.add_media(parts, document.media, size)
    else:
        lengths = [len(part) for part in parts]
        turns = zip(*[iter(lengths)] * len(SEGMENTS), strict=True) if document.turns else ()
        writer.add(np.concatenate(parts), size, list(turns))


def _grouped(documents: Iterator[tuple[Split, Document]]) -> Iterator[list[tuple[Split, Document]]]:
    group: list[tuple[Split, Document]] = []
    chars = 0
    for item in documents:
        group.append(item)
        chars += len(item[1].text) if item[1].ids is None else len(item[1].ids)
        if chars >= _ENCODE_CHARS:
            yield group
            group, chars = [], 0
    if group:
        yield group


def _check_source(source: Source, bad: BadRecords, folder: Path) -> None:
    """A source must have text in both splits, and its shards keep count of what was left out."""
    for split in ("train", "validation"):
        path = folder / split / "meta.json"
        meta = json.loads(path.read_text(encoding="utf-8"))
        if meta["documents"] == 0:
            left_out = ", ".join(f"{count} {reason}" for reason, count in bad.counts.items())
            raise MoestroError(
                f"source '{source.config.path}' has too little text to train and validate on"
                f"{f' (left out: {left_out})' if left_out else ''}; add documents"
            )
        write_json(path, meta | {"skipped": dict(bad.counts)})


def _publish(temporary: Path, folder: Path) -> None:
    try:
        os.rename(temporary, folder)
    except OSError:
        # Another process finished the same preparation first; its result is equal to ours.
        if not (folder / "meta.json").exists():
            raise


def _remove_abandoned(cache: Path) -> None:
    for path in cache.glob("data-*.tmp"):
        if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)


def _open(folder: Path, num_sources: int) -> PreparedData:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        notices, skipped = meta["notices"], meta["skipped"]
        tokenizer = Tokenizer.load(folder / "tokenizer.json")
    except (OSError, ValueError, KeyError, MoestroError) as error:
        raise broken(folder, error) from error
    shards = [[Shard.open(folder / str(i) / split) for i in range(num_sources)] for split in ("train", "validation")]
    for shard in (*shards[0], *shards[1]):
        if shard.meta["tokenizer"] != tokenizer.fingerprint:
            raise broken(folder, "tokenizer.json is not the one the tokens were made with")
    return PreparedData(folder, tokenizer, shards[0], shards[1], notices, skipped)
