"""Samples of a run's writing for its report."""

import json
from pathlib import Path
from typing import Any

from moestro.config import load_config
from moestro.serve.generate import generate
from moestro.serve.load import load_run
from moestro.train.folder import write_text

TEMPERATURE, TOP_P, MAX_NEW_TOKENS = 0.7, 0.9, 160


def write_samples(folder: Path) -> list[dict[str, Any]]:
    """Continue run.sample_prompts with the newest checkpoint and write samples.jsonl; returns the records."""
    run = load_run(folder, load_config(str(folder / "config.toml")).config.run.device)
    records = []
    for prompt in run.config.run.sample_prompts:
        pieces = generate(run.model, run.tokenizer, prompt, MAX_NEW_TOKENS, TEMPERATURE, TOP_P)
        record = {
            "step": run.step,
            "prompt": prompt,
            "text": "".join(pieces),
            "temperature": TEMPERATURE,
            "top_p": TOP_P,
        }
        records.append(record)
    write_text(folder / "samples.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    return records
