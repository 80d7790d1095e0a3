"""config.json, read with care: what is used is noted, and what cannot be represented is refused."""

import json
from pathlib import Path
from typing import Any

from moestro.errors import MoestroError

REQUIRED: Any = object()
# What says nothing about what the model computes, or only how it was trained.
IRRELEVANT = {
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "aux_loss_alpha", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id", "ep_size",
    "id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "max_window_layers",
    "model_type", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "pretraining_tp", "problem_type", "quantization_config", "resid_pdrop", "return_dict",
    "router_aux_loss_coef", "router_jitter_noise", "sep_token_id", "seq_aux", "tokenizer_class", "torch_dtype",
    "transformers_version", "unk_token_id", "use_cache",
}  # fmt: skip


class Settings:
    """The values of a config.json, and which of them were asked for."""

    def __init__(self, values: dict[str, Any], origin: str) -> None:
        self._values, self.origin, self._taken = values, origin, set[str]()

    def take(self, *names: str, default: Any = REQUIRED) -> Any:
        """The first that is there of several names for one thing."""
        self._taken.update(names)
        for name in names:
            if name in self._values:
                return self._values[name]
        if default is REQUIRED:
            raise MoestroError(f"{self.origin} lacks {names[0]}")
        return default

    def peek(self, name: str) -> Any:
        return self._values.get(name)

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse a value that is there and is not one of these."""
        value = self.take(name, default=allowed[0])
        if value not in allowed:
            raise self.refusal(name, value, f"only {' or '.join(json.dumps(a) for a in allowed)} is known")

    def refusal(self, name: str, value: Any, why: str) -> MoestroError:
        return MoestroError(f"{self.origin}: {name} = {json.dumps(value)} cannot be represented: {why}")

    def left(self) -> list[str]:
        """Names that nobody asked for and that may matter."""
        return sorted(self._values.keys() - self._taken - IRRELEVANT)


def read_json(path: Path) -> dict[str, Any]:
    """Raises MoestroError: not there, or no JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MoestroError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise MoestroError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise MoestroError(f"{path} is not a JSON object")
    return found
