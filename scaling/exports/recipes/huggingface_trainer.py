"""A Hugging Face Trainer from config.json, training_arguments.json and plan.json. Needs transformers and accelerate, and param_groups.py.

    trainer = build_trainer(train_dataset=dataset, seed=0)
    trainer.train()

Initial values, groups and schedule come from the plan; the Trainer is given the optimizer and the schedule and makes none of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import param_groups

INSTALL = "pip install transformers==5.24.0 accelerate==1.15.0"
try:
    from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
except ImportError as error:
    raise param_groups.not_installed(error, "transformers", INSTALL) from None
try:
    import accelerate  # noqa: F401 (TrainingArguments ask for it when they are made)
except ImportError as error:
    raise param_groups.not_installed(error, "accelerate", INSTALL) from None

HERE = Path(__file__).parent


def build_model(folder: Path = HERE, seed: int = 0) -> Any:
    """The model with the plan's initial values."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    param_groups.initialize(model, param_groups.read_plan(folder / "plan.json"), seed)
    return model


def build_trainer(folder: Path = HERE, seed: int = 0, model: Any = None, **trainer: Any) -> Trainer:
    """trainer: further arguments of Trainer (train_dataset, callbacks, ...)."""
    plan = param_groups.read_plan(folder / "plan.json")
    model = build_model(folder, seed) if model is None else model
    (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(str(folder / "training_arguments.json"))
    optimizer = param_groups.build_optimizer(model, plan)
    scheduler = param_groups.build_scheduler(optimizer, plan)
    return Trainer(model=model, args=arguments, optimizers=(optimizer, scheduler), **trainer)
