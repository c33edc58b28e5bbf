"""`python -m tests.coordinates.table`: every model and fault of the tests with the verdict it gets, as the docs show it."""

from __future__ import annotations

from collections import Counter

import torch

from analysis.coordinates import judge
from scaling.coordinates import measure
from tests.coordinates.test_faults import FAULTS, RIGHT, WIDTHS


def main() -> None:
    torch.set_num_threads(1)
    print("| right model | verdict |\n|---|---|")
    for name, target in RIGHT.items():
        print(f"| {name} | {judge(measure(target(), WIDTHS, seeds=2)).verdict} |", flush=True)
    print("\n| fault | verdict | named |\n|---|---|---|")
    for name, (target, *_) in FAULTS.items():
        verdict = judge(measure(target(), WIDTHS, seeds=2))
        by_statistic: dict[str, list[str]] = {}
        for item in verdict.culprits:
            by_statistic.setdefault(item.statistic, []).append(f"`{item.tensor}`")
        named = "; ".join(f"{statistic}: {', '.join(tensors)}" for statistic, tensors in by_statistic.items())
        print(f"| {name} | {verdict.verdict} | {named} |", flush=True)
    print(
        f"\n{len(RIGHT)} right models, {len(FAULTS)} faults; {dict(Counter(name.split(':')[0].split(',')[0] for name in FAULTS))}"
    )


if __name__ == "__main__":
    main()
