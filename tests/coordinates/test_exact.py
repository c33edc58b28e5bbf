"""What no slope shows: training that breaks, tensors that nothing moves, widths too near each other, targets that are not targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis.coordinate_plots import figure_coordinates
from analysis.coordinate_report import render_report
from analysis.coordinate_verdict import CoordinateVerdict
from analysis.coordinates import judge
from analysis.depth_coordinates import judge_depth
from analysis.report import svg
from scaling.coordinate_faults import TargetError
from scaling.coordinates import measure, measure_depths
from tests.coordinates.depth_targets import DeepMlp, DepthFault
from tests.coordinates.targets import BASE, CLASSES, Mlp, Supervised, mlp, transformer, with_fault

WIDTHS = (32, 64, 128, 256)
LAYERS = {f"layers.{place}.{kind}" for place in (0, 1) for kind in ("weight", "bias")}
WHOLE = {"embed.weight", "embed.bias", "readout.weight", "readout.bias"} | LAYERS


class Spare(Mlp):
    """With a parameter that no loss uses."""

    def __init__(self, width: int, readout: float) -> None:
        super().__init__(width, readout)
        self.spare = nn.Linear(width, width, bias=False)


@dataclass(frozen=True)
class Changed(Supervised):
    """The right MLP with what one width's model, learning rates, held tensors or loss are changed to."""

    lrs: Mapping[str, float] = field(default_factory=dict)
    """By the beginning of a tensor's name."""
    forgotten: tuple[str, ...] = ()
    loss_factor: float = 1.0
    prepare: Callable[[nn.Module], None] = lambda _model: None
    at_least: int = 0
    """Smallest width that is changed."""

    def build(self, width: int) -> nn.Module:
        model = super().build(width)
        if width >= self.at_least:
            self.prepare(model)
        return model

    def optimizer(self, model: nn.Module, width: int) -> torch.optim.Optimizer:
        groups = []
        for name, tensor in model.named_parameters():
            group = self._group(name, tensor, width)
            if width >= self.at_least:
                if name.startswith(self.forgotten or ("-",)):
                    continue
                group["lr"] = next((lr for start, lr in self.lrs.items() if name.startswith(start)), group["lr"])
            groups.append(group)
        return torch.optim.SGD(groups) if self.optimizer_kind == "sgd" else torch.optim.AdamW(groups)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        changed = model.get_parameter("embed.weight").shape[0] >= self.at_least
        return super().loss(model, batch) * (self.loss_factor if changed else 1.0)


def changed(model: Callable[[int, float], nn.Module] = Mlp, **changes: Any) -> Changed:
    return Changed(lambda width: model(width, BASE / width), **changes)


def nan_entry(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("layers.1.weight")[0, 0] = math.nan


def zeros(model: nn.Module) -> None:
    for tensor in model.parameters():
        nn.init.zeros_(tensor)


def check(target: Any, widths: tuple[int, ...] = WIDTHS, **options: Any) -> CoordinateVerdict:
    measurement = measure(target, widths, seeds=2, **options)
    verdict = judge(measurement)
    # The page and the picture of numbers that are not finite.
    assert verdict.verdict in render_report(verdict, "", svg(figure_coordinates(measurement, verdict)))
    return verdict


EVERY = {"embed": 1e30, "layers": 1e30, "readout": 1e30}


@pytest.mark.parametrize(
    ("target", "culprits", "statistic", "words"),
    [
        (changed(optimizer_kind="sgd", lrs=EVERY), {"loss"}, "not_finite", ("width 32", "lower the learning rate")),
        (changed(optimizer_kind="sgd", lrs=EVERY, at_least=128), {"loss"}, "not_finite", ("width 128",)),
        (changed(loss_factor=math.nan, at_least=256), {"loss"}, "not_finite", ("width 256 before the first step", "every module")),
        (changed(prepare=nan_entry, at_least=64), {"layers.1.weight"}, "not_finite", ("width 64", "init")),
        (changed(lrs={"embed.bias": math.nan}), {"loss"}, "not_finite", ("width 32 after 1 step",)),
        (changed(forgotten=("layers",)), LAYERS, "not_optimized", ("no group of the optimizer holds it:",)),
        (changed(forgotten=("layers.0.weight",), at_least=128), {"layers.0.weight"}, "not_optimized", ("holds it at width 128:",)),
        (changed(lrs=dict.fromkeys(EVERY, 0.0)), WHOLE, "frozen", ("width 32", "learning rate is 0")),
        (changed(lrs={"layers.0.weight": 0.0}, at_least=256), {"layers.0.weight"}, "frozen", ("width 256",)),
        (changed(lrs={"embed.weight": 1e-30}), {"embed.weight"}, "frozen", ("width 32", "a gradient reaches it")),
        (changed(prepare=lambda model: zeros(model.get_submodule("readout")), lrs={"readout.bias": 0.0, "readout.weight": 0.0}),
         {"readout.weight", "readout.bias"}, "frozen", ("learning rate is 0",)),
    ],
    ids=["diverges", "diverges at 128", "nan at 256", "nan init", "nan lr", "forgotten", "forgotten at 128", "lr 0", "lr 0 at 256",
         "no step", "readout frozen at zero"],
)  # fmt: skip
def test_what_no_slope_shows_fails(target: Any, culprits: set[str], statistic: str, words: tuple[str, ...]) -> None:
    verdict = check(target)
    assert verdict.verdict == "fail", str(verdict)
    assert {item.tensor for item in verdict.culprits} == culprits, str(verdict)
    for item in verdict.culprits:
        assert item.statistic == statistic
        assert all(word in item.message for word in words), item.message
    assert verdict.sentence() != "fail: "
    # Whatever the widths span.
    if "128" not in "".join(words) and "256" not in "".join(words):
        near = check(target, (32, 64))
        assert (near.verdict, {item.tensor for item in near.culprits}) == ("fail", culprits)


def test_the_run_that_breaks_in_its_last_step_fails() -> None:
    assert check(changed(optimizer_kind="sgd", lrs=EVERY), steps=1).verdict == "fail"


def test_a_model_in_which_no_gradient_goes_anywhere_fails() -> None:
    verdict = check(changed(prepare=zeros, loss_factor=0.0))
    assert verdict.verdict == "fail"
    assert [(item.tensor, item.statistic) for item in verdict.culprits] == [("loss", "frozen")], str(verdict)
    assert verdict.sentence() == "fail: nothing is trained"


def test_a_parameter_that_nothing_uses_is_noted() -> None:
    verdict = check(changed(model=Spare))
    assert verdict.verdict == "pass", str(verdict)
    assert "never moved at some width, not judged: spare.weight" in verdict.notes


def test_depth_names_them_too() -> None:
    class Forgets(DeepMlp):
        def optimizer(self, model: nn.Module, size: int) -> torch.optim.Optimizer:
            whole = super().optimizer(model, size)
            last = model.get_parameter(f"layers.{size - 1}.0.weight")
            for group in whole.param_groups:
                group["params"] = [tensor for tensor in group["params"] if tensor is not last]
            return whole

    measurement, layers = measure_depths(Forgets(), (2, 4, 8), seeds=1)
    verdict = judge_depth(measurement, layers)
    named = {(item.tensor, item.statistic) for item in verdict.culprits}
    assert verdict.verdict == "fail"
    assert ("layers.*.0.weight", "not_optimized") in named, str(verdict)
    measurement, layers = measure_depths(DeepMlp(lr=1e30, optimizer_kind="sgd"), (2, 4, 8), seeds=1)
    verdict = judge_depth(measurement, layers)
    assert [(item.tensor, item.statistic) for item in verdict.culprits] == [("loss", "not_finite")]


@pytest.mark.parametrize("widths", [(32, 33, 34, 35), (16, 18, 20, 24), (32, 256)])
@pytest.mark.parametrize("target", [mlp(), with_fault(mlp(), lr={"layers.*.weight": 1})], ids=["right", "wrong"])
def test_widths_that_span_too_little_decide_nothing(target: Any, widths: tuple[int, ...]) -> None:
    verdict = check(target, widths)
    assert (verdict.verdict, verdict.culprits) == ("inconclusive", ()), str(verdict)
    assert any("at least three widths that span a factor of four" in note for note in verdict.notes)


def test_the_decay_of_a_step_is_exact_at_any_span() -> None:
    verdict = check(with_fault(mlp(), weight_decay={"layers.*.weight": -1}), (32, 48))
    assert verdict.verdict == "inconclusive"
    assert {item.statistic for item in verdict.culprits} == {"weight_decay"}


def test_depths_that_span_too_little_decide_nothing() -> None:
    measurement, layers = measure_depths(DeepMlp(fault=DepthFault(multiplier={"layers.*.2": 1})), (4, 5, 6), seeds=1)
    verdict = judge_depth(measurement, layers)
    assert (verdict.verdict, verdict.culprits) == ("inconclusive", ())


class Vector(nn.Module):
    """Its readout is a bare vector, or the same numbers in a Linear(width, 1); right in Table 3's form, or not scaled."""

    def __init__(self, width: int, bare: bool, scaled: bool, zero: bool) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Linear(16, width), nn.Linear(width, width)
        nn.init.normal_(self.hidden.weight, std=width**-0.5)
        entries = torch.randn(width) * (BASE**0.5 / width if scaled else width**-0.5) * (not zero)
        if bare:
            self.vector = nn.Parameter(entries)
        else:
            self.readout = nn.Linear(width, 1, bias=False)
            self.readout.weight.data.copy_(entries[None])

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.hidden(F.gelu(self.embed(x))))
        return (x * self.vector).sum(-1) if hasattr(self, "vector") else self.readout(x)[..., 0]


@dataclass(frozen=True)
class VectorTarget:
    bare: bool = True
    scaled: bool = True
    zero: bool = False

    def build(self, width: int) -> nn.Module:
        model = Vector(width, self.bare, self.scaled, self.zero)
        for name in ("embed.bias", "hidden.bias"):
            nn.init.zeros_(model.get_parameter(name))
        return model

    def optimizer(self, model: nn.Module, width: int) -> torch.optim.Optimizer:
        small = ("hidden.weight", "readout.weight", "vector") if self.scaled else ("hidden.weight",)
        groups = [
            {"params": [tensor], "lr": 2.0**-7 * (BASE / width if name in small else 1.0)}
            for name, tensor in model.named_parameters()
        ]
        return torch.optim.AdamW(groups, weight_decay=0.0)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(64, 16, generator=generator), torch.randn(64, generator=generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("zero", [True, False])
def test_a_readout_that_is_a_vector_is_a_readout(bare: bool, zero: bool) -> None:
    verdict = check(VectorTarget(bare, zero=zero))
    assert verdict.verdict == "pass", str(verdict)
    wrong = check(VectorTarget(bare, scaled=False, zero=zero))
    assert {item.tensor for item in wrong.culprits} == {"vector" if bare else "readout.weight"}, str(wrong)


def test_an_embedding_that_starts_at_zero_is_not_blamed() -> None:
    class Zero(type(transformer())):  # type: ignore[misc]
        def build(self, width: int) -> nn.Module:
            model = super().build(width)
            nn.init.zeros_(model.embedding.weight)
            return model

    right = transformer()
    verdict = check(Zero(right.run, right.corpus))
    assert "multiplier" not in {item.statistic for item in verdict.culprits}, str(verdict)


class NoModule(Supervised):
    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = F.linear(batch[0], model.embed.weight, model.embed.bias)
        return F.cross_entropy(F.linear(x, model.readout.weight), batch[1])


def other(base: type[Supervised] = Supervised, model: Callable[[int], Any] | None = None, **methods: Any) -> Any:
    """The right MLP with methods that give the same whatever they are given."""
    replaced = {name: lambda _self, *_arguments, value=value: value for name, value in methods.items()}
    return type("Mine", (base,), replaced)(model or mlp().model)


def without_gradients(width: int) -> nn.Module:
    return Mlp(width, 1.0).requires_grad_(False)


def one_more(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.Linear(width, CLASSES), *([nn.Linear(CLASSES, CLASSES)] if width > 32 else []))


class Plain(Supervised):
    def optimizer(self, model: nn.Module, _width: int) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def build(self, width: int) -> nn.Module:
        return self.model(width)


@pytest.mark.parametrize(
    ("target", "place", "words"),
    [
        (other(build=None), "build", "returned None at 64, not a model"),
        (other(Plain, without_gradients), "build", "no trainable tensor at 64"),
        (other(Plain, lambda _: Mlp(64, 1.0)), "build", "nothing grows between widths 32 and 64: does build use its argument?"),
        (other(Plain, one_more), "build", "not the same tensors at every width: 2.weight, 2.bias absent at 32"),
        (other(optimizer=None), "optimizer", "returned None, which has no step and no zero_grad()"),
        (
            other(optimizer=type("O", (), {"step": print, "zero_grad": print})()),
            "optimizer",
            "returned a O, which has no param_groups",
        ),
        (other(loss=1.0), "loss", "returned a float, not a tensor"),
        (other(loss=torch.ones(3)), "loss", "returned a tensor of shape (3,), not one number"),
        (NoModule(mlp().model), "loss", "goes through no module"),
    ],
)
def test_a_target_that_is_none_says_what_is_wrong(target: Any, place: str, words: str) -> None:
    with pytest.raises(TargetError) as caught:
        measure(target, (32, 64), seeds=1)
    fault = caught.value.faults[0]
    assert fault.where == f"{type(target).__name__}.{place}()"
    assert words in fault.what
    assert fault.cure


def test_a_loss_without_a_gradient_says_so() -> None:
    class Detached(Supervised):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return super().loss(model, batch).detach()

    with pytest.raises(TargetError, match="no gradient goes through"):
        measure(Detached(mlp().model), (32, 64), seeds=1)


def test_depths_that_change_nothing_are_refused() -> None:
    with pytest.raises(TargetError, match="nothing grows between depths 2 and 8"):
        measure_depths(other(Plain, lambda _: Mlp(32, 1.0)), (2, 4, 8), seeds=1)
