"""Names of a model's tensors without their layer number: the tensors of all blocks under one name. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class LayerNames:
    """Which number in a tensor's name counts layers: the one of which a deeper model has more.

    models: the tensors' names of one model at two depths or more. `blocks.0.mlp.2.weight` is then `blocks.*.mlp.2.weight`.
    """

    def __init__(self, models: Sequence[Iterable[str]]) -> None:
        self._counted: set[str] = set()
        names = [[name.split(".") for name in model] for model in models]
        deepest = max((len(parts) for model in names for parts in model), default=0)
        for place in range(deepest):
            found = [self._numbers(model, place) for model in names]
            for prefix in set().union(*found):
                if any(numbers.get(prefix) != found[0].get(prefix) for numbers in found):
                    self._counted.add(prefix)

    def _numbers(self, model: Sequence[Sequence[str]], place: int) -> dict[str, set[str]]:
        """Prefix -> the numbers that follow it at `place`."""
        numbers: dict[str, set[str]] = {}
        for parts in model:
            if len(parts) > place and parts[place].isdigit():
                numbers.setdefault(self._free(parts[:place]), set()).add(parts[place])
        return numbers

    def _free(self, parts: Sequence[str]) -> str:
        free: list[str] = []
        for part in parts:
            free.append("*" if part.isdigit() and ".".join(free) in self._counted else part)
        return ".".join(free)

    def __call__(self, name: str) -> str:
        """The name with `*` for its layer number; unchanged where it has none."""
        return self._free(name.split("."))

    def in_blocks(self, name: str) -> bool:
        return "*" in self(name)
