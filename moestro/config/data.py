"""Where the text comes from and how it becomes batches."""

from typing import Literal, Self

from pydantic import Field, model_validator

from moestro.config.base import Section


class SourceConfig(Section):
    """One corpus of a mixture."""

    # A file or a folder of .txt, .jsonl, .parquet files (each optionally .gz for text and JSON lines);
    # "pkg:NAME" for the text files inside an installed Python package; "hf:NAME" for a Hugging Face dataset.
    path: str
    weight: float = Field(1.0, gt=0)
    text_key: str = "text"  # the field or column that holds the text of JSON lines, Parquet and datasets


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
    # Every n-th document of each source is held out for validation.
    holdout_every: int = Field(20, ge=2)
    on_bad_record: Literal["error", "skip"] = "error"
    # Tokenized shards and trained tokenizers; reused when text, tokenizer and split are unchanged.
    cache_dir: str = ".cache/moestro"
