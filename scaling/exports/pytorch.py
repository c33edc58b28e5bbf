"""Plain PyTorch: plan.json and the file that builds parameter groups, initial values and schedule from it. Torch-free."""

from __future__ import annotations

from importlib.resources import files

from scaling.exports.plan import ExportPlan

OPTIMIZERS = ("adamw", "adam", "sgd")
PARAM_GROUPS = "param_groups.py"


def recipe(name: str) -> str:
    """Text of a file of `recipes`."""
    return files("scaling.exports").joinpath("recipes", name).read_text()


def export_files(plan: ExportPlan) -> dict[str, str]:
    """File name -> content."""
    return {"plan.json": plan.to_json(), PARAM_GROUPS: recipe(PARAM_GROUPS)}
