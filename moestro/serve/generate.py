"""Text from a model, token by token, with a key-value cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moestro.data.tokenizer import Tokenizer
from moestro.errors import MoestroError
from moestro.model.transformer import Transformer


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> Iterator[str]:
    """Yield the continuation of `prompt` piece by piece; ends at end of text, max_new_tokens or model.max_seq_len.

    temperature 0 takes the likeliest token; top_p keeps the smallest set of tokens with that probability together.

    Raises:
        MoestroError: the prompt leaves no room in model.max_seq_len, or a setting is out of range.
    """
    if not temperature >= 0 or not 0 < top_p <= 1 or max_new_tokens < 1:
        raise MoestroError("temperature must be >= 0, top_p in (0, 1] and max_new_tokens >= 1")
    if not -(2**63) <= seed < 2**64:
        raise MoestroError(f"seed = {seed} does not fit into 64 bits")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise MoestroError("the prompt is not valid UTF-8") from error
    prompt_ids = [tokenizer.eot_id, *tokenizer.encode(prompt).tolist()]
    room = model.config.max_seq_len - len(prompt_ids)
    if room < 1:
        raise MoestroError(
            f"the prompt has {len(prompt_ids)} tokens and model.max_seq_len is {model.config.max_seq_len}; shorten it"
        )
    return _stream(model, tokenizer, prompt_ids, min(max_new_tokens, room), temperature, top_p, seed)


@torch.inference_mode()
def _stream(
    model: Transformer, tokenizer: Tokenizer, ids: list[int], new: int, temperature: float, top_p: float, seed: int
) -> Iterator[str]:
    device = next(model.parameters()).device
    cache = model.new_cache(1, len(ids) + new, device, model.dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    inputs = torch.tensor([ids], device=device)
    written: list[int] = []
    shown = ""
    for _ in range(new):
        hidden = model(inputs, cache=cache).hidden[0, -1]
        token = sample(model.logits(hidden), temperature, top_p, generator)
        if token == tokenizer.eot_id:
            break
        written.append(token)
        text = tokenizer.decode(written)
        if not text.endswith("\ufffd"):  # else a character's bytes are still to come
            yield text[len(shown) :]
            shown = text
        inputs = torch.tensor([[token]], device=device)


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token id from logits [vocab]."""
    if temperature == 0:
        return int(logits.argmax())
    probs, ids = ((logits - logits.max()) / temperature).softmax(-1).sort(descending=True)
    # Keep a token when what stands before it has not reached top_p; the first always stays.
    probs = torch.where(probs.cumsum(-1) - probs < top_p, probs, 0)
    return int(ids[torch.multinomial(probs, 1, generator=generator)])
