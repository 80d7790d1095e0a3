"""Records of conversations: turns of a prompt, perhaps some reasoning, and an answer."""

from dataclasses import dataclass

SEGMENTS = ("prompt", "open", "reasoning", "close", "answer")  # of a turn; each is tokenized by itself
THINK, END_THINK = "<think>\n", "\n</think>\n"


@dataclass(frozen=True)
class Turn:
    prompt: str
    answer: str
    reasoning: str = ""

    @property
    def segments(self) -> tuple[str, str, str, str, str]:
        """The turn's text in parts; the three in the middle are empty when there is no reasoning."""
        thought = (THINK, self.reasoning, END_THINK) if self.reasoning else ("", "", "")
        return f"{self.prompt}\n", *thought, f"{self.answer}\n"


def turns_in(record: object) -> tuple[Turn, ...]:
    """The turns of {"turns": [{"prompt": …, "reasoning": …, "answer": …}, …]}; reasoning may be absent or null.

    Raises:
        ValueError: what is wrong, in a few words.
    """
    turns = record.get("turns") if isinstance(record, dict) else None
    if not isinstance(turns, list) or not turns:
        raise ValueError("'turns' is not a list of turns")
    return tuple(_turn(number, turn) for number, turn in enumerate(turns))


def _turn(number: int, turn: object) -> Turn:
    values = turn if isinstance(turn, dict) else {}
    prompt, reasoning, answer = (values.get(key) for key in ("prompt", "reasoning", "answer"))
    if not isinstance(prompt, str) or not isinstance(answer, str) or not isinstance(reasoning, str | None):
        raise ValueError(f"turn {number} needs strings 'prompt' and 'answer', and 'reasoning' may be one")
    return Turn(prompt, answer, reasoning or "")
