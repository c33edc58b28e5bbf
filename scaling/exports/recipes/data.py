"""The tokens that train_fsdp.py trains on. Needs torch alone. Replace it by yours.

    tokens(path, step, first, count, sequences, context, vocabulary)

gives sequences number `first` to `first + count` (excluded) of the `sequences` of update number `step`: int64 (count, context + 1). It must
not depend on how many processes there are: each asks for its own part of the same batch.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor


def tokens(path: Path | None, step: int, first: int, count: int, sequences: int, context: int, vocabulary: int) -> Tensor:
    """Windows of a file of uint16 tokens (nanoGPT's .bin), in order, from its start again at its end; without a file random tokens.

    Raises ValueError for a file that is too short, or of another vocabulary.
    """
    numbers = range(step * sequences + first, step * sequences + first + count)
    if path is None:
        draws = [torch.Generator().manual_seed(number) for number in numbers]
        return torch.stack([torch.randint(0, vocabulary, (context + 1,), generator=draw) for draw in draws])
    stored = read(path)
    windows = (len(stored) - 1) // context
    if windows < 1:
        raise ValueError(f"{path} holds {len(stored)} tokens, and a sequence needs {context + 1}")
    found = torch.stack([stored[at : at + context + 1] for at in (number % windows * context for number in numbers)]).long()
    if int(found.max()) >= vocabulary:
        raise ValueError(f"{path} holds token {int(found.max())}, and the model's vocabulary is {vocabulary}")
    return found


@lru_cache(maxsize=1)
def read(path: Path) -> Tensor:
    """The file, mapped into memory."""
    return torch.from_file(str(path), size=path.stat().st_size // 2, dtype=torch.uint16)
