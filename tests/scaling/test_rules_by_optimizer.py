"""Parametrizations beyond muP, optimizers beyond AdamW, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from scaling.config import WITH_RULES, BaseShape, InitConfig, LRMultipliers, OptimizerConfig, RunConfig, TrainingConfig
from scaling.lion import Lion
from scaling.model import build_model
from scaling.model_config import ModelFamily
from scaling.optimizer import build_optimizer, flattened, inner_optimizers
from scaling.parametrization import UNIT_ACTIVATION, TensorRule, carried, forward_rules, muon_adjustment, tensor_rules
from tests.conftest import tiny_run
from tests.scaling.test_parametrization import FULL, fp64_losses

FAMILY = ModelFamily(depth=2, head_dim=8, context=16, vocab_size=32)


def rules_of(run: RunConfig) -> dict[str, TensorRule]:
    return {rule.name: rule for rule in tensor_rules(run)}


def with_steps(run: RunConfig, steps: int, base_steps: int, **optimizer: object) -> RunConfig:
    values = run.model_dump()
    values["training"]["steps"], values["base"]["steps"] = steps, base_steps
    values["optimizer"] |= optimizer
    return RunConfig.model_validate(values)


# u-muP and the spectral condition


def test_umup_is_its_papers_table() -> None:
    """u-muP (2407.17465) Table 2, absolute: no base shape matters."""
    family = FAMILY.model_copy(update={"depth": 4})
    run = tiny_run(64, kind="umup", family=family, optimizer=OptimizerConfig(lr=0.5, weight_decay=0.1))
    rules, forward = rules_of(run), forward_rules(run)
    up, down = rules["blocks.0.mlp.up.weight"], rules["blocks.3.mlp.down.weight"]
    assert (up.multiplier, down.multiplier) == pytest.approx((64**-0.5, 256**-0.5))
    assert (up.lr, down.lr) == pytest.approx((0.5 / 8 / 2, 0.5 / 16 / 2))
    assert rules["embedding.weight"].lr == pytest.approx(0.5 / 8)
    assert (rules["readout.weight"].lr, forward.readout) == pytest.approx((0.5, 1 / 64))
    assert {rule.init_std for rule in rules.values()} == {1.0}
    assert [rule.lr * rule.weight_decay for rule in rules.values()] == pytest.approx([0.05] * len(rules))
    assert forward.attention_scale == 1 / 8
    assert forward.attention_branch == forward.mlp_branch == pytest.approx(0.5)
    values = [(rule.lr, rule.multiplier, rule.init_std, rule.eps) for rule in tensor_rules(run)]
    other = run.model_copy(update={"base": BaseShape(width=128, depth=1)})
    assert [(rule.lr, rule.multiplier, rule.init_std, rule.eps) for rule in tensor_rules(other)] == values


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_umup_starts_at_unit_scale(activation: str) -> None:
    """Every matrix' input and output in the first block have mean square 1. Further up attention's values share what blocks below mixed
    into all positions, and their mean falls less than that of independent ones."""
    family = ModelFamily(depth=4, head_dim=32, context=64, vocab_size=256, activation=activation)
    model = build_model(tiny_run(256, kind="umup", family=family))
    sizes: dict[str, float] = {}

    def note(name: str) -> object:
        def hook(_module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            sizes.update({name: output.square().mean().item(), f"{name} in": inputs[0].square().mean().item()})

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(note(name))
    model(torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(0)))
    first = {name: size for name, size in sizes.items() if name.startswith("blocks.0")}
    assert len(first) == 2 * (7 if activation == "swiglu" else 6)
    assert first == pytest.approx(dict.fromkeys(first, 1.0), rel=0.2)


def test_unit_activation_constants() -> None:
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    for name, function in (("gelu", nn.functional.gelu), ("swiglu", nn.functional.silu)):
        second_moment = torch.trapezoid(function(x).square() * density, x).item()
        assert math.sqrt(second_moment) == pytest.approx(UNIT_ACTIVATION[name], rel=1e-5)


def test_the_residual_form_of_umup_is_one_factor_on_every_branch() -> None:
    """x <- (x + t f(norm x)) / sqrt(1 + t^2), t^2 = a^2 / (depth + sum of earlier a^2), against x + a depth^-1/2 f(norm x), fp64."""
    run = tiny_run(
        32, kind="umup", family=FAMILY.model_copy(update={"depth": 3}), residual_multiplier=0.7, residual_attention_ratio=2.0
    )
    model = build_model(run).double()
    ids = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))
    mlp = 0.7 * math.sqrt(2 / (1 + 2.0**2))
    shares, x = {"attention": 2.0 * mlp, "mlp": mlp}, model.embedding(ids)
    total = 3.0
    for block in model.blocks:
        for name, share in shares.items():
            tau = share / math.sqrt(total)
            total += share**2
            inputs = getattr(block, f"{name}_norm")(x)
            f = block.attention(inputs, model.cos, model.sin) if name == "attention" else block.mlp(inputs)
            x = (x + tau * f) / math.sqrt(1 + tau**2)
    logits = nn.functional.linear(model.final_norm(x) * model.rules.readout, model.readout.weight)
    # The norms' eps of 1e-6 is not scaled with the stream.
    torch.testing.assert_close(logits, model(ids), rtol=1e-5, atol=1e-7)


def test_spectral_is_mup_in_table_3_with_an_init_for_every_shape() -> None:
    init = InitConfig(hidden_std=0.0625)
    runs = [
        tiny_run(128, kind=kind, base_width=32, init=init, **form)
        for kind, form in (("spectral", {}), ("mup", {"form": "table3"}))
    ]
    assert fp64_losses(runs[0]) == fp64_losses(runs[1])
    family = FAMILY.model_copy(update={"queries_per_kv": 2})
    rules = rules_of(tiny_run(64, kind="spectral", family=family))
    for part, std in (("attention.query", 1 / 8), ("attention.key", 0.5**0.5 / 8), ("mlp.up", 1 / 8), ("mlp.down", 0.5 / 16)):
        rule = rules[f"blocks.0.{part}.weight"]
        assert rule.init_std == pytest.approx(std), part
        assert rule.init_std == pytest.approx(rule.fan_in**-0.5 * min(1, math.sqrt(rule.fan_out / rule.fan_in)))


def test_per_layer_lrs_of_standard_parametrization() -> None:
    """Everett et al. (2407.05872): embedding 1, hidden and readout 1/n under full alignment, n^-1/2 under none."""
    for alignment, power in (("full", 1.0), ("none", 0.5)):
        rules = rules_of(tiny_run(128, kind="sp-per-layer", log2_lr=0, alignment=alignment))
        lrs = [
            rules[name].lr
            for name in ("embedding.weight", "blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight", "readout.weight")
        ]
        assert lrs == pytest.approx([1, *[4**-power] * 3])
        assert rules["readout.weight"].init_std == pytest.approx(0.02 / 2)


# Optimizers


@pytest.mark.parametrize(("kind", "method"), [(kind, method) for kind, methods in WITH_RULES.items() for method in methods])
def test_every_combination_with_a_rule_trains(kind: str, method: str) -> None:
    lr = {"sgd": 0.1, "muon": 0.02}.get(method, 0.5 if kind == "umup" else 0.01)
    losses = fp64_losses(tiny_run(64, kind=kind, optimizer=OptimizerConfig(kind=method, lr=lr)))
    assert losses[-1] < losses[0] - 0.01


def test_every_combination_without_a_rule_is_refused() -> None:
    refused = 0
    for kind, methods in WITH_RULES.items():
        for method in {"adamw", "adam", "sgd", "lion", "muon"} - set(methods):
            with pytest.raises(ValueError, match=f"{kind} has no known rule for {method}"):
                tiny_run(32, kind=kind, optimizer=OptimizerConfig(kind=method))
            refused += 1
    assert refused == 6


@pytest.mark.parametrize(
    ("settings", "optimizer", "message"),
    [
        ({"kind": "umup", "init": InitConfig(embedding_std=0.1)}, {}, "standard deviation 1"),
        ({"kind": "mup", "alpha": 0.5}, {}, "completep's"),
        ({"kind": "mup", "alignment": "none"}, {}, "sp-per-layer's"),
        ({"kind": "umup", "form": "table3"}, {}, "umup has none"),
        ({}, {"kind": "adam", "weight_decay": 0.1, "weight_decay_rule": "independent"}, "rule for decoupled decay"),
        ({"kind": "umup"}, {"kind": "adam", "weight_decay": 0.1}, "no known rule for adam's decay"),
        ({}, {"adamw_lr_factor": 0.5}, "is muon's"),
        ({}, {"betas_rule": "horizon"}, "needs base.steps"),
        ({}, {"horizon_exponent": 0.3}, "needs base.steps"),
        ({}, {"kind": "sgd", "eps_rule": "constant"}, "has no eps"),
        ({}, {"lr_multipliers": {"gain": 2.0}}, "the model has no gains"),
        ({"form": "table3"}, {"weight_decay": 0.1, "weight_decay_rule": "unscaled"}, "another training in table3"),
        ({"form": "table9"}, {"eps_rule": "constant"}, "another training in table9"),
        ({"kind": "spectral"}, {"eps_rule": "constant"}, "another training in spectral"),
        ({}, {"kind": "muon", "adamw_lr_factor": 1e300}, "less than or equal"),
    ],
)
def test_settings_that_would_be_ignored_or_guessed_are_refused(
    settings: dict[str, object], optimizer: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_run(32, optimizer=OptimizerConfig.model_validate(optimizer), **settings)


@pytest.mark.parametrize("kind", ["mup-simple", "sp-per-layer", "umup", "spectral"])
def test_tied_weights_are_refused_where_embedding_and_readout_differ(kind: str) -> None:
    with pytest.raises(ValueError, match="they are one tensor"):
        tiny_run(32, kind=kind, family=FULL.model_copy(update={"tied_embeddings": True}))


def test_lion_is_its_algorithm() -> None:
    """Chen et al. (2302.06675) Algorithm 2, written out for one tensor."""
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(5, generator=generator), torch.randn(4, 5, generator=generator)
    parameter = nn.Parameter(start.clone())
    optimizer = Lion([{"params": [parameter], "lr": 0.1, "weight_decay": 0.5}], betas=(0.9, 0.99))
    expected, momentum = start.clone(), torch.zeros(5)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        direction = torch.sign(0.9 * momentum + 0.1 * gradient)
        expected = expected - 0.1 * (direction + 0.5 * expected)
        momentum = 0.99 * momentum + 0.01 * gradient
    torch.testing.assert_close(parameter.data, expected)


def test_decay_in_the_gradient_keeps_its_share_of_the_gradient() -> None:
    """Adam's decay is divided by the gradient's size: over widths its share of the update's change of the weight must stay.

    Measured: decay * (size of the weights' change) / (size of the gradient), at two widths, by role.
    """

    def shares(width: int) -> dict[str, float]:
        run = tiny_run(width, base_width=32, optimizer=OptimizerConfig(kind="adam", lr=0.01, eps=1e-12, weight_decay=0.01))
        model, rules = build_model(run), rules_of(run)
        model.loss(torch.randint(32, (32, 17), generator=torch.Generator().manual_seed(0))).backward()
        names = ("embedding.weight", "blocks.0.mlp.up.weight", "blocks.1.mlp.down.weight", "readout.weight")
        gradients = {name: dict(model.named_parameters())[name].grad.square().mean().sqrt().item() for name in names}
        return {name: rules[name].weight_decay * rules[name].lr / gradients[name] for name in names}

    narrow, wide = shares(32), shares(256)
    for name in narrow:
        assert wide[name] / narrow[name] == pytest.approx(1, abs=0.35), name


def test_muon_moves_hidden_matrices_and_its_update_keeps_the_spectral_rule() -> None:
    """||change of W||_2 goes with sqrt(m_out / m_in) (Qiu et al. 2512.05620), also where torch's own factor changes with the shape."""

    def sizes(width: int, mlp_ratio: float) -> dict[str, tuple[TensorRule, float]]:
        family = FAMILY.model_copy(update={"queries_per_kv": 2, "mlp_ratio": mlp_ratio})
        run = tiny_run(width, family=family, base_width=32, optimizer=OptimizerConfig(kind="muon", lr=0.02))
        model = build_model(run)
        optimizer, rules = build_optimizer(model, run), rules_of(run)
        before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        model.loss(torch.randint(32, (64, 17), generator=torch.Generator().manual_seed(0))).backward()
        optimizer.step()
        return {
            name: (rules[name], torch.linalg.matrix_norm(tensor.detach() - before[name], 2).item())
            for name, tensor in model.named_parameters()
            if rules[name].role == "hidden"
        }

    narrow, wide = sizes(32, 4.0), sizes(128, 4.0)
    assert {rule.optimizer for rule, _ in wide.values()} == {"muon"}
    for name, (rule, size) in wide.items():
        base_rule, base_size = narrow[name]
        m_in, m_out = rule.fan_in / base_rule.fan_in, rule.fan_out / base_rule.fan_out
        # Newton-Schulz leaves singular values between .7 and 1.2.
        assert size / base_size == pytest.approx(math.sqrt(m_out / m_in), rel=0.3), name
    # Rounding to multiples of 8 gives the MLP another shape than the base's: 8 x 16 instead of 8 x 8 at twice the width and ratio 1/4.
    run = tiny_run(
        48, family=FAMILY.model_copy(update={"mlp_ratio": 0.75}), base_width=8, optimizer=OptimizerConfig(kind="muon", lr=1.0)
    )
    up = rules_of(run)["blocks.0.mlp.down.weight"]
    effective = up.lr * muon_adjustment(up.fan_out, up.fan_in) / muon_adjustment(8, 8)
    assert effective == pytest.approx(math.sqrt((up.fan_out / 8) / (up.fan_in / 8)))


def test_muon_leaves_the_rest_to_adamw() -> None:
    run = tiny_run(64, optimizer=OptimizerConfig(kind="muon", lr=0.02, adamw_lr_factor=0.25))
    muon, adamw = inner_optimizers(build_optimizer(build_model(run), run))
    assert isinstance(muon, torch.optim.Muon)
    names = {name for group in adamw.param_groups for name in group["names"]}
    assert names == {"embedding.weight", "readout.weight"}
    assert {group["lr"] for group in adamw.param_groups} == {0.005}


def test_multipliers_by_class() -> None:
    multipliers = LRMultipliers(embedding=4.0, hidden=0.5, gain=2.0, readout=8.0)
    run = tiny_run(32, family=FULL, optimizer=OptimizerConfig(lr=0.01, lr_multipliers=multipliers))
    lrs = {rule.role: rule.lr for rule in tensor_rules(run)}
    assert lrs == pytest.approx(
        {"embedding": 0.04, "hidden": 0.005, "block_gain": 0.02, "qk_gain": 0.02, "final_gain": 0.02, "readout": 0.08}
    )


def test_eps_may_stay_constant() -> None:
    optimizer = OptimizerConfig(eps=1e-8, eps_rule="constant")
    assert {rule.eps for rule in tensor_rules(tiny_run(256, optimizer=optimizer))} == {1e-8}
    assert {rule.eps for rule in tensor_rules(tiny_run(256))} == {1e-8 / 8}


# Number of steps


def test_a_run_follows_its_number_of_steps_from_base_steps() -> None:
    run = tiny_run(64, optimizer=OptimizerConfig(lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95))
    longer = with_steps(run, steps=64, base_steps=16, betas_rule="horizon")
    for before, after in zip(tensor_rules(run), tensor_rules(longer), strict=True):
        assert (after.lr, after.weight_decay) == pytest.approx((before.lr / 2, before.weight_decay / 2))
        assert after.eps == pytest.approx(2 * before.eps)
    optimizer = build_optimizer(build_model(longer), longer)
    assert optimizer.param_groups[0]["betas"] == pytest.approx((0.975, 0.9875))
    assert carried(with_steps(run, steps=64, base_steps=16, horizon_exponent=0.0)).lr == 0.01
    assert carried(run) == run.optimizer


def test_betas_that_would_reach_1_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"1 - beta1 = 0.1 / S = 1.25 reaches 1 at S = 0.08; use constant, or more steps"):
        with_steps(tiny_run(32), steps=8, base_steps=100, betas_rule="horizon")


@pytest.mark.parametrize("method", ["sgd", "lion", "muon"])
def test_no_number_of_steps_rule_is_guessed(method: str) -> None:
    with pytest.raises(ValueError, match=f"no rule is known that carries {method}"):
        with_steps(tiny_run(32, optimizer=OptimizerConfig(kind=method)), steps=10, base_steps=100)


# Schedules


def test_a_scheduler_that_flattens_the_groups_is_seen() -> None:
    run = tiny_run(128, optimizer=OptimizerConfig(lr=0.01), training=TrainingConfig(steps=4, batch_size=2))
    optimizer = build_optimizer(build_model(run), run)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert len({group["lr"] for group in optimizer.param_groups}) > 1
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 2))
    assert flattened(optimizer) == []
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    names = [name for group in flattened(optimizer) for name in group["names"]]
    assert set(names) == {rule.name for rule in tensor_rules(run) if rule.role == "hidden"}
