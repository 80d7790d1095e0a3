"""Where the text comes from and how it becomes batches."""

from typing import Literal, Self

from pydantic import Field, model_validator

from moestro.config.base import Section


class SourceConfig(Section):
    """One corpus of a mixture."""

    # A file or a folder of .txt, .jsonl, .parquet files (each optionally .gz for text and JSON lines);
    # "pkg:NAME" for the text files inside an installed Python package; "hf:NAME" for a Hugging Face dataset.
    path: str
    name: str | None = None  # for the mixtures of phases, which otherwise call it by its number
    weight: float = Field(1.0, gt=0)
    text_key: str = "text"  # the field or column that holds the text of JSON lines, Parquet and datasets
    # "turns": .jsonl files of {"turns": [{"prompt": …, "reasoning": …, "answer": …}, …]}; reasoning may be absent.
    # "media": .jsonl files of {"text": "… <NAME> …", "media": ["FILE.npy", …]}, see docs/data.md, with the names of
    # model.encoders. "tokens": .jsonl files of {"tokens": [ids]}, ready for the model (MoMa's image codes).
    format: Literal["text", "turns", "media", "tokens"] = "text"
    # Shorten the reasoning of training records that are longer than a sequence, and never their answers; a record whose
    # prompts and answers alone are longer is left out. Held-out records stay whole.
    trim: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.trim and self.format != "turns":
            raise ValueError('trim needs format = "turns": in plain text nobody knows what the answer is')
        return self


class TokenizerConfig(Section):
    kind: Literal["byte", "bpe", "file"] = "bpe"
    vocab_size: int = Field(1024, ge=258)  # only for "bpe", which is trained on the corpus
    path: str | None = None  # only for "file": a tokenizer.json

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.kind == "file") != (self.path is not None):
            raise ValueError('path and kind = "file" go together: set both or neither')
        return self


class DataConfig(Section):
    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    tokenizer: TokenizerConfig = TokenizerConfig()
    seq_len: int = Field(ge=2)
    # "modality": all sequences of a global batch come from sources whose documents hold items of the same encoders, or
    # none; the mixture's shares are then of batches (Uni-MoE). "sample": each sequence comes from where it falls.
    batch_by: Literal["sample", "modality"] = "sample"
    # Every n-th document of each source is held out for validation.
    holdout_every: int = Field(20, ge=2)
    on_bad_record: Literal["error", "skip"] = "error"
    # Tokenized shards and trained tokenizers; reused when text, tokenizer and split are unchanged.
    cache_dir: str = ".cache/moestro"

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = self.source_names
        if len(set(names)) != len(names):
            raise ValueError(f"two sources have the same name ({', '.join(names)})")
        return self

    @property
    def source_names(self) -> list[str]:
        return [source.name if source.name is not None else str(i) for i, source in enumerate(self.sources)]
