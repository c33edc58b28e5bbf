"""A source whose entropy is known: a first-order Markov chain in which every row is the same Zipf law, permuted.

Given the token before, the next one is the k-th of that token's own permutation with probability proportional to k^-exponent.
Every row has the entropy of the Zipf law, so the chain's entropy rate is exactly that, and no model can be better on average.
"""

from __future__ import annotations

import numpy as np

CHAINS = 64


def zipf_probabilities(vocab: int, exponent: float) -> np.ndarray:
    """(vocab,) probabilities of the ranks."""
    weights = np.arange(1, vocab + 1, dtype=np.float64) ** -exponent
    return weights / weights.sum()


def entropy_floor(vocab: int, exponent: float) -> float:
    """Entropy rate in nats per token."""
    probabilities = zipf_probabilities(vocab, exponent)
    return float(-(probabilities * np.log(probabilities)).sum())


def generate(tokens: int, vocab: int, exponent: float, seed: int) -> np.ndarray:
    """`tokens` tokens as uint16. The table of permutations is the same for every seed; the walk is not.

    The walk is made of a few long chains end to end, so that it can be computed side by side; the joints do not matter.
    """
    table = np.stack([np.random.default_rng([7, state]).permutation(vocab) for state in range(vocab)])
    rng = np.random.default_rng([11, seed])
    length = -(-tokens // CHAINS)
    cumulative = np.cumsum(zipf_probabilities(vocab, exponent))
    ranks = np.minimum(np.searchsorted(cumulative, rng.random((length, CHAINS))), vocab - 1)
    walk = np.empty((length, CHAINS), dtype=np.uint16)
    state = rng.integers(vocab, size=CHAINS)
    for position in range(length):
        state = table[state, ranks[position]]
        walk[position] = state
    return walk.T.reshape(-1)[:tokens]
