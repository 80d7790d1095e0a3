"""Small corpora on disk and the prepared data made of them."""

import json
from pathlib import Path
from typing import Any

from moestro.config import DataConfig
from moestro.data.prepare import PreparedData, prepare


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def data_config(tmp_path: Path, *paths: Path | str, **settings: Any) -> DataConfig:
    """A config over `paths` with the byte tokenizer and a cache under tmp_path."""
    sources = settings.pop("sources", [{"path": str(path)} for path in paths])
    defaults = {"seq_len": 16, "tokenizer": {"kind": "byte"}, "cache_dir": str(tmp_path / "cache"), "holdout_every": 4}
    return DataConfig.model_validate(defaults | {"sources": sources} | settings)


def prepared(config: DataConfig) -> PreparedData:
    return prepare(config, progress=False)
