from pathlib import Path

import numpy as np
import pytest

from moestro.data import shards
from moestro.data.shards import Shard, ShardWriter
from moestro.errors import MoestroError

DOCUMENTS = [[1, 2, 3], [], [7] * 500]


def write(folder: Path, vocab_size: int = 300) -> Shard:
    with ShardWriter(folder, vocab_size, eot_id=256, meta={"notice": "n"}) as writer:
        for document in DOCUMENTS:
            writer.add(np.array(document, dtype=np.uint32), text_bytes=2 * len(document))
    return Shard.open(folder)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32")])
def test_round_trip(vocab_size: int, dtype: str, tmp_path: Path) -> None:
    shard = write(tmp_path / "s", vocab_size)
    assert [shard.document(i).tolist() for i in range(shard.num_documents)] == DOCUMENTS
    assert shard.tokens.dtype == dtype
    assert shard.tokens[[0, *(shard.offsets[1:] - 1)]].tolist() == [256] * 4
    assert shard.document_lengths.tolist() == [4, 1, 501]
    assert (shard.num_tokens, shard.bytes.tolist(), shard.meta["notice"]) == (506, [6, 0, 1000], "n")


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "bytes.npy", "meta.json"])
def test_truncated_file(name: str, tmp_path: Path) -> None:
    write(tmp_path / "s")
    path = tmp_path / "s" / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(MoestroError, match=r"incomplete or damaged.*Delete that folder"):
        Shard.open(tmp_path / "s")


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "bytes.npy"])
def test_altered_byte(name: str, tmp_path: Path) -> None:
    write(tmp_path / "s")
    path = tmp_path / "s" / name
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.write_bytes(data)
    with pytest.raises(MoestroError, match=f"(?s){name}.*altered.*Delete that folder"):
        Shard.open(tmp_path / "s")


def test_large_shards_are_checked_in_full_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "s")
    path = tmp_path / "s" / "tokens.bin"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(shards, "VERIFY_ON_OPEN_BYTES", 0)
    shard = Shard.open(tmp_path / "s")
    with pytest.raises(MoestroError, match=r"tokens\.bin was altered"):
        shard.verify()


def test_missing_and_unfinished(tmp_path: Path) -> None:
    with pytest.raises(MoestroError, match="Delete that folder"):
        Shard.open(tmp_path / "none")

    def interrupted() -> None:
        with ShardWriter(tmp_path / "s", 300, 256, {}) as writer:
            writer.add(np.array([1]), 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(MoestroError, match=r"meta\.json"):
        Shard.open(tmp_path / "s")
