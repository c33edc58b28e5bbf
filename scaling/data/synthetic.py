"""A source whose entropy is known: a first-order Markov chain in which every row is the same Zipf law, permuted.

Given the token before, the next one is the k-th of that token's own permutation with probability proportional to k^-exponent.
Every row has the entropy of the Zipf law, so the chain's entropy rate is exactly that, and no model can be better on average.
"""

from __future__ import annotations

import numpy as np

MOST_CHAINS = 1024
SHORTEST_CHAIN = 4096
_BLOCK = 1024


def zipf_probabilities(vocab: int, exponent: float) -> np.ndarray:
    """(vocab,) probabilities of the ranks."""
    weights: np.ndarray = np.arange(1, vocab + 1, dtype=np.float64) ** -exponent
    weights /= weights.sum()
    return weights


def entropy_floor(vocab: int, exponent: float) -> float:
    """Entropy rate in nats per token."""
    probabilities = zipf_probabilities(vocab, exponent)
    # A steep law underflows to zero, and 0 log 0 is 0.
    probabilities = probabilities[probabilities > 0]
    return float(-(probabilities * np.log(probabilities)).sum())


def generate(tokens: int, vocab: int, exponent: float, seed: int) -> np.ndarray:
    """`tokens` tokens as uint16. The table of permutations is the same for every seed; the walk is not.

    The walk is long chains end to end, computed side by side; of its transitions at most one in SHORTEST_CHAIN is a joint.
    """
    table = np.stack([np.random.default_rng([7, state]).permutation(vocab).astype(np.uint16) for state in range(vocab)])
    rng = np.random.default_rng([11, seed])
    chains = min(max(tokens // SHORTEST_CHAIN, 1), MOST_CHAINS)
    length = -(-tokens // chains)
    cumulative = np.cumsum(zipf_probabilities(vocab, exponent))
    walk = np.empty((length, chains), dtype=np.uint16)
    state = rng.integers(vocab, size=chains).astype(np.uint16)
    for first in range(0, length, _BLOCK):
        block = walk[first : first + _BLOCK]
        # The sum may round to less than one, which would leave room for a rank that is none.
        ranks = np.minimum(np.searchsorted(cumulative, rng.random(block.shape)), vocab - 1)
        for position, rank in enumerate(ranks):
            state = table[state, rank]
            block[position] = state
    return walk.T.reshape(-1)[:tokens]
