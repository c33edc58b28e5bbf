"""The transformer: shapes, causality, positions, grouped queries, counts, FLOPs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scaling.accounting import flops_per_token, parameter_counts, run_flops
from scaling.config import TrainingConfig
from scaling.model import Attention, Transformer, build_model, rotary_tables, rotate
from scaling.model_config import ModelFamily
from scaling.parametrization import ForwardRules
from tests.conftest import tiny_run

VARIANTS = [
    ModelFamily(
        depth=2,
        head_dim=8,
        context=16,
        vocab_size=32,
        activation=activation,
        norm_gain=gain,
        qk_norm=qk,
        tied_embeddings=tied,
        queries_per_kv=group,
    )
    for activation, gain, qk, tied, group in itertools.product(
        ("gelu", "swiglu"), (False, True), (False, True), (False, True), (1, 2)
    )
]


def model_of(family: ModelFamily, width: int = 32) -> Transformer:
    return build_model(tiny_run(width, family=family))


@pytest.mark.parametrize("family", VARIANTS, ids=str)
def test_variant_is_causal_and_every_parameter_learns(family: ModelFamily) -> None:
    model = model_of(family)
    tokens = torch.randint(32, (3, 17), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 32
    with torch.no_grad():
        first, second = model(tokens[:, :-1]), model(changed[:, :-1])
    assert first.shape == (3, 16, 32)
    assert torch.equal(first[:, :10], second[:, :10])
    assert not torch.allclose(first[:, 10:], second[:, 10:])
    model.loss(tokens).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_untrained_loss_is_that_of_a_uniform_guess() -> None:
    tokens = torch.randint(32, (8, 17), generator=torch.Generator().manual_seed(1))
    assert model_of(VARIANTS[0]).loss(tokens).item() == pytest.approx(torch.tensor(32.0).log().item(), abs=0.05)


def test_rotary_scores_depend_on_distance_alone() -> None:
    cos, sin = rotary_tables(12, 8, 10_000.0)
    query, key = (
        torch.randn(8, generator=torch.Generator().manual_seed(0)),
        torch.randn(8, generator=torch.Generator().manual_seed(1)),
    )
    queries, keys = (rotate(x.expand(1, 12, 1, 8), cos, sin)[0, :, 0] for x in (query, key))
    scores = queries @ keys.T
    for distance in range(1, 12):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[5, 0] != pytest.approx(scores[6, 0].item(), abs=1e-3)
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(12))


def test_grouped_queries_equal_full_attention_with_repeated_keys_and_values() -> None:
    rules = ForwardRules(embedding=1.0, readout=1.0, attention_scale=0.3)
    grouped = Attention(ModelFamily(head_dim=8, queries_per_kv=2, vocab_size=32).at(32), rules)
    full = Attention(ModelFamily(head_dim=8, vocab_size=32).at(32), rules)
    with torch.no_grad():
        for name in ("query", "output"):
            getattr(full, name).weight.copy_(getattr(grouped, name).weight)
        for name in ("key", "value"):
            weight = getattr(grouped, name).weight.view(2, 8, 32)
            getattr(full, name).weight.copy_(weight.repeat_interleave(2, dim=0).reshape(32, 32))
        x, tables = torch.randn(2, 9, 32), rotary_tables(9, 8, 10_000.0)
        torch.testing.assert_close(grouped(x, *tables), full(x, *tables))


@pytest.mark.parametrize("family", VARIANTS[::5], ids=str)
def test_counts_are_those_of_the_model(family: ModelFamily) -> None:
    model, counts = model_of(family), parameter_counts(family.at(32))
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    assert counts.non_embedding == counts.total - counts.embedding - counts.readout
    assert (counts.readout == 0) == family.tied_embeddings


def test_flops_agree_with_torch_counting_them() -> None:
    """Torch counts attention unmasked; ours counts the causal half."""
    family = ModelFamily(depth=2, head_dim=8, context=16, vocab_size=32)
    model = model_of(family)
    tokens = torch.zeros(2, 17, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model.loss(tokens).backward()
    attention = 6 * family.depth * 32 * 16
    assert flops_per_token(family.at(32)) + attention == pytest.approx(counter.get_total_flops() / 32, rel=1e-6)


def test_flops_of_a_huge_run_do_not_overflow() -> None:
    family = ModelFamily(depth=100, head_dim=128, vocab_size=100_000)
    run = tiny_run(16384, family=family, base_width=128, training=TrainingConfig(steps=10**7, batch_size=10**5))
    assert run_flops(run) > 1e26


def test_init_depends_on_the_seed_alone() -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        run = tiny_run(training=TrainingConfig(seed=seed))
        return [parameter.detach() for parameter in build_model(run).parameters()]

    assert all(map(torch.equal, weights(1), weights(1)))
    assert not any(map(torch.equal, weights(1), weights(2)))
