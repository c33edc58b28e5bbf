"""The rules table: against the mup package, against itself under equivalent forms, and its identities."""

from __future__ import annotations

import math

import mup
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling.config import WITH_RULES, BaseShape, InitConfig, OptimizerConfig, ParametrizationConfig, RunConfig
from scaling.model import Transformer, build_model
from scaling.model_config import ModelFamily
from scaling.optimizer import build_optimizer
from scaling.parametrization import at_horizon, forward_rules, horizon_betas, tensor_rules
from scaling.shapes import transformer_tensors
from scaling.tables import formula, rows_of
from tests.conftest import tiny_run

FULL = ModelFamily(
    depth=2,
    head_dim=8,
    queries_per_kv=2,
    context=8,
    vocab_size=32,
    activation="swiglu",
    norm_gain=True,
    qk_norm=True,
    mlp_ratio=2,
)


def test_every_parametrization_has_a_row_for_every_role() -> None:
    roles = {spec.role for spec in transformer_tensors(FULL.at(32))}
    for kind, optimizers in WITH_RULES.items():
        table = rows_of(ParametrizationConfig(kind=kind))
        assert set(table) == roles, kind
        assert ("sgd" in optimizers) == all(row.sgd_lr is not None for row in table.values()), kind
        assert ("muon" in optimizers) == (table["hidden"].muon_lr is not None), kind


def test_mup_equals_sp_at_the_base_width() -> None:
    def values(kind: str) -> list[tuple[float, ...]]:
        rules = tensor_rules(tiny_run(32, kind=kind, family=FULL, init=InitConfig(hidden_std=0.05)))
        return [(rule.multiplier, rule.lr, rule.weight_decay, rule.eps) for rule in rules]

    assert values("mup") == values("sp")
    assert forward_rules(tiny_run(32, kind="mup")) == forward_rules(tiny_run(32, kind="sp"))


SHAPES = {
    "width": st.sampled_from([16, 32, 64, 128]),
    "base": st.sampled_from([16, 32, 64]),
    "activation": st.sampled_from(["gelu", "swiglu"]),
    "group": st.sampled_from([1, 2]),
    "mlp_ratio": st.sampled_from([1.0, 2.0, 4.0]),
}


def with_mup_shapes(run: RunConfig) -> Transformer:
    """The run's model as the mup package sees it: infinite dimensions found from the base width and twice that."""
    model = build_model(run)
    family = ModelFamily(**{name: getattr(run.model, name) for name in ModelFamily.model_fields})
    shapes = [build_model(tiny_run(size, family=family)) for size in (run.base.width, 2 * run.base.width)]
    mup.set_base_shapes(model, shapes[0], delta=shapes[1], rescale_params=False, do_assert=False)
    return model


@settings(deadline=None, max_examples=25)
@given(**SHAPES, decay=st.floats(0.01, 0.3), method=st.sampled_from(["adamw", "sgd"]))
def test_lr_and_decay_agree_with_the_mup_package(
    width: int, base: int, activation: str, group: int, mlp_ratio: float, decay: float, method: str
) -> None:
    """MuAdamW's and MuSGD's groups (Table 8) against ours, tensor by tensor, and MuReadout's multiplier."""
    family = FULL.model_copy(update={"activation": activation, "queries_per_kv": group, "mlp_ratio": mlp_ratio})
    optimizer = OptimizerConfig(kind=method, lr=0.01, weight_decay=decay)
    run = tiny_run(width, family=family, base_width=base, optimizer=optimizer)
    model, rules = with_mup_shapes(run), {rule.name: rule for rule in tensor_rules(run)}
    names = {parameter: name for name, parameter in model.named_parameters()}
    theirs = {"adamw": mup.MuAdamW, "sgd": mup.MuSGD}[method](model.parameters(), lr=0.01, weight_decay=decay)
    seen = set()
    for parameters in theirs.param_groups:
        for parameter in parameters["params"]:
            rule = rules[names[parameter]]
            seen.add(rule.name)
            assert parameters["lr"] == pytest.approx(rule.lr, rel=1e-12), rule.name
            if not rule.role.endswith("gain"):
                assert parameters["weight_decay"] == pytest.approx(rule.weight_decay, rel=1e-12), rule.name
    assert seen == set(rules)
    readout = model.readout.weight.infshape
    assert forward_rules(run).readout == pytest.approx(1 / readout.width_mult())


@settings(deadline=None, max_examples=25)
@given(**SHAPES)
def test_init_std_agrees_with_the_mup_package(width: int, base: int, activation: str, group: int, mlp_ratio: float) -> None:
    """mup.init.normal_ with one std, against the same draws at our std."""
    family = FULL.model_copy(update={"activation": activation, "queries_per_kv": group, "mlp_ratio": mlp_ratio})
    init = InitConfig(embedding_std=0.05, hidden_std=0.05, readout_std=0.05)
    run = tiny_run(width, family=family, base_width=base, init=init)
    parameters = dict(with_mup_shapes(run).named_parameters())
    for rule in tensor_rules(run):
        if math.isnan(rule.init_std):
            continue
        parameter = parameters[rule.name]
        torch.manual_seed(0)
        mup.init.normal_(parameter, std=0.05)
        torch.manual_seed(0)
        torch.testing.assert_close(parameter.data, torch.empty_like(parameter).normal_(0, rule.init_std), rtol=1e-6, atol=0)


def test_init_std_is_what_the_rules_say() -> None:
    run = tiny_run(128, family=FULL.model_copy(update={"vocab_size": 512}))
    parameters = dict(build_model(run).named_parameters())
    for rule in tensor_rules(run):
        if math.isnan(rule.init_std):
            assert bool((parameters[rule.name] == 1).all())
        else:
            sampling_error = 4 / math.sqrt(2 * parameters[rule.name].numel())
            assert parameters[rule.name].std().item() == pytest.approx(rule.init_std, rel=sampling_error), rule.name


@pytest.mark.parametrize(("kind", "exponent"), [("mup", -0.5), ("sp", 0.0)])
def test_constant_hidden_std_follows_its_table(kind: str, exponent: float) -> None:
    init = InitConfig(hidden_std=0.02)
    base, wide = (tensor_rules(tiny_run(width, kind=kind, init=init))[1].init_std for width in (32, 128))
    assert wide / base == pytest.approx(4**exponent)


def test_lr_times_decay_is_constant_in_width_under_mup() -> None:
    def products(width: int) -> list[float]:
        return [
            rule.lr * rule.weight_decay for rule in tensor_rules(tiny_run(width, optimizer=OptimizerConfig(weight_decay=0.1)))
        ]

    assert products(128) == pytest.approx(products(32))


@pytest.mark.parametrize("theta", [0.25, 2.0, 8.0])
def test_equivalent_forms_train_bit_identically(theta: float) -> None:
    """Lemma J.1: A*t, B/t, C/t, E*t, decay*t on the readout leaves every loss unchanged (fp64, t a power of two)."""
    run = tiny_run(64, optimizer=OptimizerConfig(lr=0.01, weight_decay=0.1, eps=1e-3))
    tokens = torch.randint(32, (4, 17), generator=torch.Generator().manual_seed(0))

    def losses(theta: float) -> list[float]:
        model = build_model(run).double()
        rules = {rule.name: rule for rule in tensor_rules(run)}
        forms = {name: (theta if name == "readout.weight" else 1.0) for name in rules}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter /= forms[name]
        model.rules = type(model.rules)(model.rules.embedding, model.rules.readout * theta, model.rules.attention_scale)
        groups = [
            {
                "params": [parameter],
                "lr": rules[name].lr / forms[name],
                "eps": rules[name].eps * forms[name],
                "weight_decay": rules[name].weight_decay * forms[name],
            }
            for name, parameter in model.named_parameters()
        ]
        optimizer, history = torch.optim.AdamW(groups, betas=(0.9, 0.95)), []
        for _ in range(5):
            loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        return history

    reference = losses(1.0)
    assert losses(theta) == reference
    assert reference[-1] < reference[0]


@pytest.mark.parametrize("method", ["adamw", "adam", "lion", "sgd", "muon"])
@pytest.mark.parametrize("form", ["table3", "table9"])
@pytest.mark.parametrize("kind", ["mup", "completep"])
def test_tensor_programs_tables_train_bit_identically(kind: str, form: str, method: str) -> None:
    """In fp64 and with a ratio that is a power of 4, so that its square root is a power of two, every loss is the same number."""

    def run(form: str) -> RunConfig:
        return tiny_run(
            128, kind=kind, base_width=32, family=ModelFamily(depth=2, head_dim=8, context=8, vocab_size=32),
            optimizer=OptimizerConfig(kind=method, lr=0.01, eps=1e-3, weight_decay=0.125), form=form,
        )  # fmt: skip

    assert fp64_losses(run(form)) == fp64_losses(run("table8"))
    assert len(set(fp64_losses(run(form)))) == 5


def fp64_losses(run: RunConfig) -> list[float]:
    """Losses of five steps on one batch, in fp64."""
    model = build_model(run).double()
    optimizer = build_optimizer(model, run)
    tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(0))
    history = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


def test_completep_is_mup_at_the_base_depth_and_scales_branches_beyond() -> None:
    def run(kind: str, depth: int, **settings: object) -> RunConfig:
        family = FULL.model_copy(update={"depth": depth})
        whole = tiny_run(64, kind=kind, base_width=32, family=family, optimizer=OptimizerConfig(weight_decay=0.1), **settings)
        return whole.model_copy(update={"base": BaseShape(width=32, depth=2)})

    def values(run: RunConfig) -> list[tuple[float, ...]]:
        return [(rule.multiplier, rule.lr, rule.weight_decay, rule.eps) for rule in tensor_rules(run)]

    assert values(run("completep", 2)) == values(run("mup", 2))
    deep, shallow = ({rule.name: rule for rule in tensor_rules(run("completep", depth, alpha=0.5))} for depth in (8, 2))
    assert forward_rules(run("completep", 8, alpha=0.5)).mlp_branch == 0.5
    assert forward_rules(run("completep", 8)).mlp_branch == 0.25
    hidden, embedding = "blocks.0.mlp.up.weight", "embedding.weight"
    assert deep[hidden].lr == pytest.approx(0.5 * shallow[hidden].lr)
    assert deep[hidden].eps == pytest.approx(0.5 * shallow[hidden].eps)
    assert deep[hidden].init_std == pytest.approx(shallow[hidden].init_std)
    assert (deep[embedding].lr, deep[embedding].eps) == (shallow[embedding].lr, shallow[embedding].eps)


def test_forms_and_tied_weights_that_have_no_rule_are_refused() -> None:
    tied = FULL.model_copy(update={"tied_embeddings": True})
    for settings_ in ({"form": "table3"}, {"kind": "mup-simple"}):
        with pytest.raises(ValueError, match="they are one tensor"):
            tiny_run(64, family=tied, **settings_)
    with pytest.raises(ValueError, match="form table9 is one of muP's"):
        tiny_run(64, kind="sp", form="table9")


def test_weight_decay_rules() -> None:
    def decays(rule: str, width: int, lr: float = 0.01) -> dict[str, tuple[float, float]]:
        optimizer = OptimizerConfig(lr=lr, weight_decay=0.1, weight_decay_rule=rule)
        rules = tensor_rules(tiny_run(width, family=FULL, optimizer=optimizer))
        return {item.role: (item.weight_decay, item.lr * item.weight_decay) for item in rules}

    assert decays("constant", 128)["hidden"] == pytest.approx((0.4, 0.001))
    assert decays("unscaled", 128)["hidden"] == pytest.approx((0.1, 0.00025))
    assert decays("sqrt", 128)["hidden"] == pytest.approx((0.2, 0.0005))
    assert decays("sqrt", 128)["embedding"] == (0.0, 0.0)
    for width, lr in ((32, 0.01), (128, 0.01), (128, 0.1)):
        independent = decays("independent", width, lr)
        assert [independent[role][1] for role in ("embedding", "hidden", "readout")] == pytest.approx([0.1] * 3)
    for rule in ("constant", "unscaled", "independent", "sqrt"):
        assert decays(rule, 128)["block_gain"] == (0.0, 0.0)


def test_younger_keys_do_not_rename_older_runs() -> None:
    """The name that a run had before its config knew forms, alpha and decay rules: stored studies stay whole."""
    assert tiny_run(32).run_id == "aa3f4097d3e1"
    assert tiny_run(32, form="table3").run_id != tiny_run(32).run_id


def test_attention_scale_is_one_over_sqrt_when_heads_grow_and_one_over_d_when_head_dim_grows() -> None:
    grown_heads = [forward_rules(tiny_run(width)).attention_scale for width in (32, 128)]
    assert grown_heads == [1 / math.sqrt(8)] * 2
    wide_heads = ModelFamily(depth=1, num_heads=4, context=8, vocab_size=32)
    scales = [forward_rules(tiny_run(width, family=wide_heads)).attention_scale for width in (32, 128)]
    assert scales == pytest.approx([1 / math.sqrt(8), math.sqrt(8) / 32])


def test_horizon_keeps_the_share_of_the_run_that_decay_averages_over() -> None:
    base = OptimizerConfig(lr=0.01, weight_decay=0.1, eps=1e-8)
    longer = at_horizon(base, steps_ratio=16)
    assert (longer.lr, longer.weight_decay, longer.eps) == pytest.approx((0.0025, 0.025, 4e-8))
    assert longer.lr * longer.weight_decay * 16 == pytest.approx(base.lr * base.weight_decay)


def test_betas_refuse_a_batch_that_is_too_large() -> None:
    assert horizon_betas((0.9, 0.96), 2.0) == pytest.approx((0.95, 0.98))
    with pytest.raises(ValueError, match="1 - beta1"):
        horizon_betas((0.9, 0.95), 0.05)


def test_formula_reads_as_a_person_writes() -> None:
    assert formula("lr", {"m_in": -1}) == "lr / m_in"
    assert formula("0.02", {"m_in": -0.5, "m_N": 1}) == "0.02 * m_in^-0.5 * m_N"
