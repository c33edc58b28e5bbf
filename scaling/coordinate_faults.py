"""What can be wrong with a coordinate check's target itself, before anything is judged: said with the method and the cure.

Owns `TargetError`; its places are the target's methods, to which the command line adds the name that the target was given by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from scaling.coordinate_rows import TensorFacts
from scaling.errors import ConfigError, Fault


class TargetError(ConfigError):
    """A target's method does not do what the check asks of it."""


def fault_of(target: Any, method: str, what: str, cure: str) -> TargetError:
    return TargetError(Fault(f"{type(target).__name__}.{method}()", what, cure))


def check_model(target: Any, model: object, width: int) -> None:
    """That build gave a module with something to train."""
    if not isinstance(model, nn.Module):
        raise fault_of(target, "build", f"returned {_kind(model)} at {width}, not a model", "return a torch.nn.Module")
    if not any(tensor.requires_grad for tensor in model.parameters()):
        what = f"the model has no trainable tensor at {width}: requires_grad is False everywhere"
        raise fault_of(target, "build", what, "leave requires_grad on for what is trained")


def check_optimizer(target: Any, optimizer: Any) -> None:
    """That it has what the check calls, and groups that hold tensors."""
    cure = "return a torch.optim.Optimizer, or an object with step(), zero_grad() and a list of them named `optimizers`"
    absent = [name for name in ("step", "zero_grad") if not callable(getattr(optimizer, name, None))]
    if absent:
        raise fault_of(target, "optimizer", f"returned {_kind(optimizer)}, which has no {' and no '.join(absent)}()", cure)
    for inner in getattr(optimizer, "optimizers", [optimizer]):
        groups = getattr(inner, "param_groups", None)
        if not isinstance(groups, list) or not all(isinstance(group, dict) and "params" in group for group in groups):
            raise fault_of(target, "optimizer", f"returned {_kind(inner)}, which has no param_groups", cure)


def check_loss(target: Any, loss: object, *, trained: bool) -> Tensor:
    """The loss, as a tensor of one number; trained: with its graph."""
    cure = "return the mean loss as a tensor, as F.cross_entropy(...) gives it"
    if not isinstance(loss, Tensor):
        raise fault_of(target, "loss", f"returned {_kind(loss)}, not a tensor", cure)
    if loss.numel() != 1:
        raise fault_of(target, "loss", f"returned a tensor of shape {tuple(loss.shape)}, not one number", cure)
    if trained and not loss.requires_grad:
        what = "returned a loss that no gradient goes through: it was detached, or computed without gradients"
        raise fault_of(target, "loss", what, "compute it from the model's output, without detach(), item() or no_grad()")
    return loss


def check_sizes(target: Any, facts: Mapping[str, TensorFacts], widths: Sequence[int]) -> None:
    """That it is one model at several widths: the same tensors everywhere, and something that grows."""
    if len(widths) < 2:
        return
    small, large = widths[0], widths[-1]
    for width in widths:
        absent = [name for name, item in facts.items() if width not in item.shapes]
        if absent:
            what = f"not the same tensors at every width: {', '.join(absent[:5])} absent at {width}"
            raise fault_of(target, "build", what, "build one model at every width, whose tensors differ in shape only")
    ranks = [name for name, item in facts.items() if len({len(shape) for shape in item.shapes.values()}) > 1]
    if ranks:
        what = f"not the same number of dimensions at every width: {', '.join(ranks[:5])}"
        raise fault_of(target, "build", what, "build one model at every width, whose tensors differ in size only")
    if not any(item.growing for item in facts.values()):
        what = f"nothing grows between widths {small} and {large}: does build use its argument?"
        raise fault_of(target, "build", what, "make the model's hidden sizes from build's argument")


def check_depths(target: Any, build: Callable[[int], nn.Module], depths: Sequence[int]) -> list[list[str]]:
    """Names of the tensors at the least and the greatest depth, which must differ in something."""
    small, large = min(depths), max(depths)
    shapes = []
    for depth in (small, large):
        model = build(depth)
        check_model(target, model, depth)
        shapes.append({name: tuple(tensor.shape) for name, tensor in model.named_parameters()})
    if small < large and shapes[0] == shapes[1]:
        what = f"nothing grows between depths {small} and {large}, the tensors are the same: does build use its argument?"
        raise fault_of(target, "build", what, "with --depths, build's argument is the number of layers")
    return [list(names) for names in shapes]


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
