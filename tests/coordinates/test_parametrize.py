"""parametrize() on modules as users write them: the coordinate check passes on them, and nothing is lost on the way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mup
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis.coordinates import judge
from scaling.coordinates import measure
from scaling.errors import ConfigError
from scaling.lion import Lion
from scaling.optimizer import Optimizers
from scaling.parametrize import parametrize

BASE, WIDTHS = 32, (32, 64, 128, 256)
ROOT = Path(__file__).parents[2]


class Mlp(nn.Module):
    """torch's default init everywhere, biases included."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ConvNet(nn.Module):
    """Convolutions, one of them by depth alone, a transposed one, norms, and a hidden layer of another fan_in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.up = nn.ConvTranspose2d(width, 2 * width, 1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.depthwise(self.stem(x)))
        return self.head(torch.relu(self.norm(self.up(x))).mean(dim=(2, 3)))


class Lm(nn.Module):
    """A language model with a tied readout, a raw position embedding and torch's own attention."""

    def __init__(self, width: int, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.position = nn.Parameter(0.1 * torch.randn(12, width))
        self.block = nn.TransformerEncoderLayer(width, width // 8, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(width)
        self.readout = nn.Linear(width, 32, bias=False)
        if tied:
            self.readout.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.readout(self.norm(self.block(self.embedding(ids) + self.position)))


@dataclass(frozen=True)
class Own:
    """A coordinate check's target around `parametrize`."""

    model: Callable[[int], nn.Module]
    data: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    options: dict[str, Any]
    kind: str = "adamw"

    def build(self, width: int) -> nn.Module:
        return self.model(width)

    def optimizer(self, model: nn.Module, _width: int) -> Any:
        mup = parametrize(
            model,
            base=self.model(BASE),
            delta=self.model(2 * BASE),
            lr={"sgd": 0.1, "muon": 0.02}.get(self.kind, 2.0**-7),
            weight_decay=0.1 if self.kind != "adam" else 0.0,
            eps=1e-12,
            optimizer=self.kind,
            **self.options,
        )
        if self.kind == "muon":
            return Optimizers([torch.optim.Muon(mup.groups_of("muon")), torch.optim.AdamW(mup.groups_of("adamw"))])
        kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "lion": Lion, "adamw": torch.optim.AdamW}
        return kinds[self.kind](mup.groups)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self.data(torch.Generator().manual_seed(99 + step))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def vectors(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn((64, 16), generator=generator), torch.randint(10, (64,), generator=generator)


def pictures(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn((32, 3, 6, 6), generator=generator), torch.randint(10, (32,), generator=generator)


def tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(32, (16, 12), generator=generator), torch.randint(32, (16, 12), generator=generator)


POSITION = {"roles": {"position": "input"}}
MODELS = {
    "mlp": Own(Mlp, vectors, {}),
    "mlp, sgd": Own(Mlp, vectors, {}, "sgd"),
    "mlp, adam": Own(Mlp, vectors, {}, "adam"),
    "mlp, lion": Own(Mlp, vectors, {}, "lion"),
    "mlp, muon": Own(Mlp, vectors, {}, "muon"),
    "convnet": Own(ConvNet, pictures, {}),
    "language model": Own(lambda width: Lm(width, tied=False), tokens, POSITION),
    "language model, tied": Own(Lm, tokens, POSITION),
}


class CheckedAfterOptimizer(Own):
    """parametrize() rescales when the optimizer is made: the check's initial values are read after that."""

    def build(self, width: int) -> nn.Module:
        model = self.model(width)
        self.optimizer(model, width)
        return model


@pytest.mark.parametrize("name", MODELS)
def test_the_coordinate_check_passes(name: str) -> None:
    own = MODELS[name]
    verdict = judge(measure(CheckedAfterOptimizer(own.model, own.data, own.options, own.kind), WIDTHS, seeds=2))
    assert verdict.verdict == "pass", str(verdict)


def test_without_it_the_check_fails() -> None:
    class Plain(Own):
        def optimizer(self, model: nn.Module, _width: int) -> torch.optim.Optimizer:
            return torch.optim.AdamW(model.parameters(), lr=2.0**-7, eps=1e-12)

    assert judge(measure(Plain(Mlp, vectors, {}), WIDTHS, seeds=2)).verdict == "fail"


def made(model: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    parametrize(model, base=Mlp(BASE), lr=0.01)
    return model


def losses(module: nn.Module, **options: Any) -> list[float]:
    """Of four steps with AdamW on one batch."""
    inputs, labels = vectors(torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(parametrize(module, base=Mlp(BASE), lr=0.01, **options).groups)
    history = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(inputs), labels)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


def test_a_second_call_changes_nothing_and_a_copy_keeps_it() -> None:
    model = made(Mlp(128))
    before = copy.deepcopy(model.state_dict())
    again = parametrize(model, base=Mlp(BASE), lr=0.01)
    copied = copy.deepcopy(model)
    parametrize(copied, base=Mlp(BASE), lr=0.01)
    for other in (model.state_dict(), copied.state_dict()):
        assert all(torch.equal(before[name], other[name]) for name in before)
    assert all(item.rescaled == 1.0 for item in again.tensors)


def test_trained_weights_are_not_rescaled() -> None:
    model = Mlp(128)
    before = copy.deepcopy(model.state_dict())
    result = parametrize(model, base=Mlp(BASE), lr=0.01, rescale=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert next(item for item in result.tensors if item.role == "hidden").lr == pytest.approx(0.01 / 4)


def test_state_dict_and_compiled_models_train_the_same() -> None:
    model = made(Mlp(64))
    fresh = Mlp(64)
    fresh.load_state_dict(model.state_dict())
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    reference = losses(copy.deepcopy(model))
    assert losses(fresh, rescale=False) == reference
    assert losses(compiled) == reference


def test_a_tied_readout_keeps_its_multiplier_through_a_copy() -> None:
    ids = tokens(torch.Generator().manual_seed(0))[0]
    model = Lm(64)
    plain = model(ids).detach()
    result = parametrize(model, base=Lm(BASE), lr=0.01, roles={"position": "input"})
    tied = next(item for item in result.tensors if item.name == "embedding.weight")
    assert (tied.role, tied.multiplier) == ("input", 0.5)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(ids), model(ids))
    assert float(model(ids).detach().std()) < 0.8 * float(plain.std())
    parametrize(copied, base=Lm(BASE), lr=0.01, roles={"position": "input"})
    assert torch.equal(copied(ids), model(ids))


class MupMlp(nn.Module):
    """The same network of the mup package's layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(16, width), nn.Linear(width, width), mup.MuReadout(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


def with_mup_shapes(width: int) -> nn.Module:
    model = MupMlp(width)
    mup.set_base_shapes(model, MupMlp(BASE), delta=MupMlp(2 * BASE))
    return model


def test_it_trains_as_the_mup_package_does() -> None:
    """The same function, weights and data in fp64 with eps out of the way: losses agree to rounding over ten steps."""
    inputs, labels = (item.double() if item.is_floating_point() else item for item in vectors(torch.Generator().manual_seed(0)))
    torch.manual_seed(0)
    theirs, ours = MupMlp(128).double(), Mlp(128).double()
    mup.set_base_shapes(theirs, MupMlp(BASE), delta=MupMlp(2 * BASE))
    groups = parametrize(ours, base=Mlp(BASE).double(), lr=0.01, weight_decay=0.1, eps=1e-30).groups
    factor = 128 / BASE
    with torch.no_grad():
        for mine, other, scale in ((0, theirs.first, 1.0), (2, theirs.second, 1.0), (4, theirs.out, 1 / factor)):
            ours.layers[mine].weight.copy_(scale * other.weight)
            ours.layers[mine].bias.copy_(other.bias)
    for group in groups:  # the package decays biases as well
        group["weight_decay"] = 0.1 * (0.01 / group["lr"])
    optimizers = (torch.optim.AdamW(groups), mup.MuAdamW(theirs.parameters(), lr=0.01, weight_decay=0.1, eps=1e-30))
    for _ in range(10):
        pair = []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            pair.append(loss.item())
        assert pair[0] == pytest.approx(pair[1], rel=1e-9)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_model_of_mups_layers_gets_the_packages_own_groups(kind: str) -> None:
    torch.manual_seed(0)
    model = with_mup_shapes(128)
    before = copy.deepcopy(model.state_dict())
    result = parametrize(model, lr=0.01, optimizer=kind)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    names = {parameter: name for name, parameter in model.named_parameters()}
    theirs = {"adamw": mup.MuAdamW, "sgd": mup.MuSGD}[kind](model.parameters(), lr=0.01)
    expected = {names[tensor]: group["lr"] for group in theirs.param_groups for tensor in group["params"]}
    assert {item.name: item.lr for item in result.tensors} == pytest.approx(expected)
    assert next(item for item in result.tensors if item.name == "out.weight").multiplier == 0.25


def test_a_model_of_mups_layers_passes_the_coordinate_check() -> None:
    class Theirs(Own):
        def optimizer(self, model: nn.Module, _width: int) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parametrize(model, lr=2.0**-7, eps=1e-12).groups)

    assert judge(measure(Theirs(with_mup_shapes, vectors, {}), WIDTHS, seeds=2)).verdict == "pass"


def test_mups_layers_are_not_scaled_twice() -> None:
    with pytest.raises(ConfigError, match=r"leave `base` out, or make it nn\.Linear"):
        parametrize(with_mup_shapes(128), base=MupMlp(BASE), lr=0.01)
    with pytest.raises(ConfigError, match="has no base shape, and no `base` was given"):
        parametrize(Mlp(128), lr=0.01)

    class Plain(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(16, width), nn.Linear(width, 10)

    plain = Plain(128)
    mup.set_base_shapes(plain, Plain(BASE), delta=Plain(2 * BASE), do_assert=False)
    with pytest.raises(ConfigError, match=r"make it a mup\.MuReadout"):
        parametrize(plain, lr=0.01)


def test_a_base_shapes_file_says_the_same_as_a_base_model(tmp_path: Path) -> None:
    """torch's own init is what a file's user has, as the mup package takes it: values, groups and losses are those of the base model."""
    file = tmp_path / "mlp.bsh"
    mup.make_base_shapes(Mlp(BASE), Mlp(2 * BASE), savefile=str(file))
    torch.manual_seed(0)
    first = Mlp(128)
    second = copy.deepcopy(first)
    by_model, by_file = parametrize(first, base=Mlp(BASE), lr=0.01), parametrize(second, base=file, lr=0.01)
    for one, other in zip(by_model.tensors, by_file.tensors, strict=True):
        assert (one.name, one.role, one.m_in, one.m_out, one.lr) == (other.name, other.role, other.m_in, other.m_out, other.lr)
        assert one.rescaled == pytest.approx(other.rescaled), one.name
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(tensor, second.state_dict()[name])


def test_a_file_that_is_not_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mlp.bsh"
    with pytest.raises(ConfigError, match="cannot be read"):
        parametrize(Mlp(64), base=file, lr=0.01)
    for text in ("[1, 2]", "layers: 3", "a: [x]"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="is no base-shapes file"):
            parametrize(Mlp(64), base=file, lr=0.01)
    file.write_text("layers.0.weight: [32]")
    with pytest.raises(ConfigError, match="is in the model and not in"):
        parametrize(Mlp(64), base=file, lr=0.01)


def test_muon_takes_the_hidden_matrices_of_a_users_model() -> None:
    result = parametrize(ConvNet(64), base=ConvNet(BASE), lr=0.02, optimizer="muon", adamw_lr_factor=0.1)
    muon, adamw = result.groups_of("muon"), result.groups_of("adamw")
    assert [name for group in muon for name in group["names"]] == ["head.0.weight"]
    assert len(muon) + len(adamw) == len(result.groups)
    torch.optim.Muon(muon, adjust_lr_fn="original")
    torch.optim.AdamW(adamw)
    assert [item.lr for item in result.tensors if item.role == "input"] == pytest.approx([0.002, 0.002])


class Wrapped(nn.Module):
    """A user's own class with a child named as torch's wrappers name theirs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.module = Mlp(width)
        self.scale = nn.Parameter(torch.ones(10))


def test_a_child_named_module_is_no_wrapper() -> None:
    result = parametrize(Wrapped(64), base=Wrapped(BASE), lr=0.01)
    assert {item.name for item in result.tensors} == {name for name, _ in Wrapped(64).named_parameters()}
    wrapped = nn.DataParallel(Mlp(64))
    assert len(parametrize(wrapped, base=Mlp(BASE), lr=0.01).tensors) == 6


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"positoin": "input"}, "did you mean 'position'"),
        ({"position": "in"}, "use one of input, hidden, readout"),
        ({"position": "input", "readout.weight": "readout"}, "is a parameter of Linear, whose use is known"),
        ({"position": "input", "norm.weight": "readout"}, "is a vector or scalar"),
    ],
)
def test_roles_that_would_be_ignored_are_refused(roles: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parametrize(Lm(64, tied=False), base=Lm(BASE, tied=False), lr=0.01, roles=roles)


def roles_of(build: Callable[[int], nn.Module]) -> dict[str, str]:
    return {item.name: item.role for item in parametrize(build(64), base=build(BASE), lr=0.01).tensors}


def test_depthwise_convolutions_read_one_channel() -> None:
    for kind in (nn.Conv1d, nn.ConvTranspose1d):
        assert roles_of(lambda width, kind=kind: kind(width, width, 3, groups=width))["weight"] == "input"
    assert roles_of(lambda width: nn.ConvTranspose1d(width, width, 3, groups=4))["weight"] == "hidden"


def test_added_keys_and_values_of_attention_are_inputs() -> None:
    roles = roles_of(lambda width: nn.MultiheadAttention(width, 4, add_bias_kv=True))
    assert (roles["bias_k"], roles["bias_v"], roles["in_proj_weight"]) == ("input", "input", "hidden")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("normalize", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_that_are_normalized_in_the_forward_pass_are_refused(normalize: Callable[[nn.Module], nn.Module]) -> None:
    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), normalize(nn.Linear(width, 10)))

    with pytest.raises(ConfigError, match="normalizes in its forward pass"):
        parametrize(build(64), base=build(BASE), lr=0.01)


def test_a_file_needs_torchs_own_init(tmp_path: Path) -> None:
    file = tmp_path / "mlp.bsh"
    mup.make_base_shapes(Mlp(BASE), Mlp(2 * BASE), savefile=str(file))
    model = Mlp(128)
    nn.init.normal_(model.layers[2].weight, std=0.02)
    with pytest.raises(ConfigError, match="does not start as torch starts it"):
        parametrize(model, base=file, lr=0.01)
    parametrize(model, base=file, lr=0.01, rescale=False)


def test_small_tensors_do_not_let_their_draws_decide() -> None:
    """A value head of 64 entries: its constant std and torch's own are told apart by what they are, not by one noisy ratio."""

    def head(width: int, std: float | None) -> nn.Module:
        layer = nn.Linear(width, 1, bias=False)
        if std is not None:
            nn.init.normal_(layer.weight, std=std)
        return layer

    for std, factor in ((0.02, 0.5), (None, 0.5**0.5)):
        seen = set()
        for seed in range(100):
            torch.manual_seed(seed)
            seen.add(round(parametrize(head(128, std), base=head(64, std), lr=0.01).tensors[0].rescaled, 4))
        assert seen == {round(factor, 4)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr: "),
        ({"weight_decay": -1.0}, "weight_decay: "),
        ({"optimizer": "AdamW"}, "optimizer: "),
        ({"base": 64}, "base: is a int"),
        ({"optimizer": "adam", "weight_decay": 0.1, "weight_decay_rule": "independent"}, "rule for decoupled decay"),
        ({"adamw_lr_factor": 3.0}, "is muon's"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parametrize(Mlp(64), **({"base": Mlp(BASE), "lr": 0.01} | options))


def test_models_without_shapes_or_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="pass a batch through the model first"):
        parametrize(nn.LazyLinear(10), base=nn.LazyLinear(10), lr=0.01)
    with torch.device("meta"):
        empty = Mlp(64)
    with pytest.raises(ConfigError, match="build the model on a device"):
        parametrize(empty, base=Mlp(BASE), lr=0.01)
    broken = Mlp(64)
    nn.init.constant_(broken.layers[0].weight, float("nan"))
    with pytest.raises(ConfigError, match="not finite"):
        parametrize(broken, base=Mlp(BASE), lr=0.01)


def test_muon_without_a_hidden_matrix_is_refused() -> None:
    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 10))

    with pytest.raises(ConfigError, match="the model has none"):
        parametrize(build(64), base=build(BASE), lr=0.02, optimizer="muon")


def test_another_base_needs_another_model() -> None:
    model = made(Mlp(128))
    with pytest.raises(ConfigError, match="build the model anew"):
        parametrize(model, base=Mlp(64), lr=0.01)


def test_a_tied_readout_called_by_keyword_is_scaled() -> None:
    torch.manual_seed(0)
    model = Lm(64)
    parametrize(model, base=Lm(BASE), lr=0.01, roles={"position": "input"})
    x = torch.randn(2, 64)
    assert torch.equal(model.readout(input=x), model.readout(x))


def test_an_optimizer_of_other_groups_cannot_be_checked() -> None:
    result = parametrize(Mlp(64), base=Mlp(BASE), lr=0.01)
    with pytest.raises(ConfigError, match="was not made by parametrize"):
        result.check(torch.optim.AdamW(Mlp(64).parameters()))


def test_a_scheduler_that_flattens_the_groups_is_refused() -> None:
    result = parametrize(Mlp(128), base=Mlp(BASE), lr=0.01)
    optimizer = torch.optim.AdamW(result.groups)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 0.5)
    result.check(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    with pytest.raises(ConfigError, match="multiplies each group's own learning rate"):
        result.check(optimizer)


def test_what_cannot_be_classified_is_named_with_its_cure() -> None:
    with pytest.raises(ConfigError) as error:
        parametrize(Lm(64), base=Lm(BASE), lr=0.01)
    assert [fault.where for fault in error.value.faults] == ["position"]
    assert "roles={'position': 'input'}" in str(error.value)
    with pytest.raises(ConfigError, match="is in the model and not in `base`"):
        parametrize(Mlp(64), base=Lm(BASE), lr=0.01)
    with torch.device("meta"):
        base = Mlp(BASE)
    with pytest.raises(ConfigError, match="on the meta device"):
        parametrize(Mlp(64), base=base, lr=0.01)


def test_the_readme_shows_three_lines_that_work() -> None:
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    code = next(block.split("```")[0] for block in blocks if "parametrize(" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    assert {item.role for item in names["mup"].tensors} == {"input", "hidden", "readout", "vector", "constant"}
    assert len(names["optimizer"].param_groups) <= 5


def test_at_the_base_width_nothing_changes() -> None:
    torch.manual_seed(0)
    model = Mlp(BASE)
    before = copy.deepcopy(model.state_dict())
    result = parametrize(model, base=Mlp(BASE), lr=0.01, eps=1e-8)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert {(item.lr, item.eps) for item in result.tensors} == {(0.01, 1e-8)}
    assert len(result.groups) == 1


def test_decay_at_the_base_width_is_the_one_that_was_asked_for() -> None:
    """Nothing is seen to grow there; matrices decay and vectors do not, as at every other width."""
    for options in ({}, {"delta": Mlp(2 * BASE)}):
        result = parametrize(Mlp(BASE), base=Mlp(BASE), lr=0.01, weight_decay=0.1, **options)
        assert {item.weight_decay for item in result.tensors if len(item.shape) == 2} == {0.1}
        assert {item.weight_decay for item in result.tensors if len(item.shape) < 2} == {0.0}


def test_muon_at_the_base_width_needs_a_second_width_to_see_what_is_hidden() -> None:
    with pytest.raises(ConfigError, match="give delta="):
        parametrize(Mlp(BASE), base=Mlp(BASE), lr=0.02, optimizer="muon")
    result = parametrize(Mlp(BASE), base=Mlp(BASE), delta=Mlp(2 * BASE), lr=0.02, optimizer="muon")
    assert [group["names"] for group in result.groups_of("muon")] == [["layers.2.weight"]]


def test_a_sharded_model_trains_the_same(tmp_path: Path) -> None:
    """FSDP2 on one process over gloo: parametrized, sharded, and given its groups again from the sharded tensors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = made(Mlp(64))
    reference = losses(copy.deepcopy(model))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        sharded = fully_shard(copy.deepcopy(model), mesh=init_device_mesh("cpu", (1,)))
        assert losses(sharded) == pytest.approx(reference, rel=1e-6)
    finally:
        dist.destroy_process_group()
