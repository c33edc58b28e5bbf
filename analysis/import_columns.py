"""Which of a tracker's values becomes which column: names given by the user, names that everybody uses, products such as steps*batch.

Owns the words that are recognised and the grammar of `--column`; every column says where it comes from and whether that was guessed.
A product is names and numbers joined by `*`, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.import_runs import ForeignRun, Source, lookup, number, same, unknown_name
from analysis.table import POSITIVE
from scaling.errors import DataError, Fault, raise_all

Factor = float | tuple[str, ...]
"""A number, or dotted names of which a run may have several that must agree."""
TEXT_COLUMNS = ("parametrization", "seed", "status", "run_id")
NUMBER_COLUMNS = ("width", "depth", "batch_tokens", "tokens", "lr", "log2_lr", "params", "flops")
COLUMNS = (*TEXT_COLUMNS, *NUMBER_COLUMNS, "loss")
REQUIRED = ("width", "lr")
USUAL: Mapping[str, tuple[str, ...]] = {
    "width": ("width", "d_model", "n_embd", "hidden_size", "model_dim", "dim_model", "embed_dim", "emb_dim", "hidden_dim"),
    "depth": ("depth", "n_layer", "n_layers", "num_layers", "num_hidden_layers"),
    "lr": ("lr", "learning_rate", "base_lr", "max_lr", "peak_lr", "max_learning_rate"),
    "log2_lr": ("log2_lr",),
    "batch_tokens": ("batch_tokens", "tokens_per_batch", "tokens_per_step"),
    "tokens": ("tokens", "train_tokens", "total_tokens", "num_tokens", "n_tokens", "max_tokens", "token_budget"),
    "seed": ("seed", "random_seed", "rng_seed"),
    "parametrization": ("parametrization", "parameterization", "use_mup", "mup"),
    "params": ("params", "n_params", "num_params", "num_parameters", "n_parameters", "total_params"),
    "flops": ("flops", "total_flops"),
}
"""What people call a column, in the config; `params`, `tokens` and `flops` are also looked for among the metrics."""
MEASURED = ("params", "tokens", "flops")
USUAL_LOSSES = ("val_loss", "validation_loss", "valid_loss", "eval_loss", "dev_loss", "loss_val", "loss_eval", "loss")
"""In this order of preference the last one, "loss", only where none of the others is there."""
METRIC_PARTS = ("summary", "metrics", "scalars")
YES, NO = ("true", "1", "yes", "1.0"), ("false", "0", "no", "0.0")


@dataclass(frozen=True)
class Column:
    """A column of the table to come: a product of factors, or one value for all runs."""

    name: str
    factors: tuple[Factor, ...]
    said: str
    """Where it comes from, as the account prints it."""
    guessed: bool = False
    constant: str | None = None
    switch: bool = False
    """The value is a switch named after muP: true is `mup`, false is `sp`."""

    @property
    def names(self) -> set[str]:
        return {name for factor in self.factors if not isinstance(factor, float) for name in factor}

    def value(self, run: ForeignRun) -> object | None:
        """The run's value, None where it has none. Raises ValueError, in words, for one that contradicts itself or is no number."""
        if self.constant is not None:
            return self.constant
        if self.name in TEXT_COLUMNS:
            return self._text(run)
        product = 1.0
        for factor in self.factors:
            if isinstance(factor, float):
                product *= factor
                continue
            found = agreed(run, factor)
            if found is None:
                return None
            try:
                product *= number(found)
            except ValueError as error:
                raise ValueError(f"{factor[0]}: {error}") from None
        if self.name in POSITIVE and not product > 0:
            raise ValueError(f"{self.name} is {product:g}, and must be positive")
        return product

    def _text(self, run: ForeignRun) -> str | None:
        (names,) = self.factors
        assert not isinstance(names, float), "a column of text is one name"
        found = agreed(run, names)
        if found is None:
            return None
        text = str(found).strip()
        if self.switch:
            return "mup" if text.lower() in YES else "sp"
        return text.removesuffix(".0")


def agreed(run: ForeignRun, names: Sequence[str]) -> object | None:
    """What the run holds under any of `names`. Raises ValueError when two of them differ."""
    found = [(name, value) for name in names if (value := run.get(name)) is not None]
    for name, value in found[1:]:
        if not same(found[0][1], value):
            raise ValueError(f"{found[0][0]} is {found[0][1]} and {name} is {value}: map one of them by its full name")
    return found[0][1] if found else None


def resolve(source: Source, given: Mapping[str, str], constants: Mapping[str, str]) -> dict[str, Column]:
    """Column name -> where it comes from, for all that is given and all that can be guessed without a doubt.

    given: {column: name, product of names and numbers, or "" for none}; constants: {column: value}. `loss` and `status` are not guessed.
    Raises DataError with every fault.
    """
    faults = _wrong_names(given, constants)
    present = source.names()
    columns = {name: Column(name, (), f"{value!r} for all runs", constant=value) for name, value in constants.items()}
    for name, text in given.items():
        if name not in COLUMNS or name in constants or not text:
            continue
        factors, wrong = _factors(name, text, present, given, (name,))
        faults += wrong
        if not wrong:
            columns[name] = Column(name, factors, _said(factors), switch=_is_switch(source, name, factors))
    for name in USUAL:
        if name in given or name in constants or (name == "lr" and "log2_lr" in given) or (name == "log2_lr" and "lr" in columns):
            continue
        found = _guess(source, name)
        if len(found) > 1:
            cure = f"choose one: --column {name}={found[0][0]}" + ("" if name in REQUIRED else f", or none: --column {name}=")
            what = f"may be any of {', '.join(names[0] for names in found)}, which differ"
            faults.append(Fault(f"{source.where}: column {name!r}", what, cure))
        elif found:
            columns[name] = Column(name, (found[0],), _said(found), True, switch=_is_switch(source, name, found))
    faults += [_missing(source, name) for name in REQUIRED if not _have(name, columns, faults)]
    raise_all(faults, DataError)
    return columns


def _wrong_names(given: Mapping[str, str], constants: Mapping[str, str]) -> list[Fault]:
    known = ", ".join(COLUMNS)
    faults = [
        Fault(f"--column {name}={text}", f"{name!r} is not a column of the table", f"the columns: {known}")
        for name, text in given.items()
        if name not in COLUMNS
    ]
    faults += [
        Fault(
            f"--value {name}={text}",
            f"{name!r} is not a column that has one value",
            f"the columns: {known}, less loss and run_id",
        )
        for name, text in constants.items()
        if name not in COLUMNS or name in ("loss", "run_id")
    ]
    faults += [Fault(f"--value {name}", "is given by --column too", "leave one out") for name in constants if name in given]
    for name, text in constants.items():
        if name in NUMBER_COLUMNS:
            try:
                number(text)
            except ValueError as error:
                faults.append(Fault(f"--value {name}={text}", str(error), f"for example --value {name}=64"))
    return faults


def _factors(
    name: str, text: str, names: Sequence[str], given: Mapping[str, str], above: tuple[str, ...]
) -> tuple[tuple[Factor, ...], list[Fault]]:
    """The product that `text` stands for; a factor that is another given column stands for that column's own product."""
    where = f"--column {name}={text}"
    whole = lookup(text, names)
    if whole:
        return (tuple(whole),), _ambiguous(where, text, whole)
    if "*" not in text:
        return (), [unknown_name(where, text, names)]
    if name in TEXT_COLUMNS:
        return (), [Fault(where, "is a product, and the column holds words", f"give one name: --column {name}=NAME")]
    factors: list[Factor] = []
    faults: list[Fault] = []
    for part in map(str.strip, text.split("*")):
        if (constant := _constant(part)) is not None:
            factors.append(constant)
        elif part in given and part not in above and part in NUMBER_COLUMNS:
            inner, wrong = _factors(part, given[part], names, given, (*above, part))
            factors += inner
            # The fault of a factor that is a column of its own is told there.
            faults += [] if wrong and not lookup(part, names) else wrong
            faults += [Fault(where, f"column {part!r} is faulty itself", "see there")] if wrong else []
        elif found := lookup(part, names):
            factors.append(tuple(found))
            faults += _ambiguous(where, part, found)
        else:
            faults.append(unknown_name(where, part, names))
    return tuple(factors), faults


def _constant(part: str) -> float | None:
    try:
        return float(part)
    except ValueError:
        return None


def _ambiguous(where: str, name: str, found: Sequence[str]) -> list[Fault]:
    """Several nested keys that end alike are different things; one key in several parts of a source is one thing, said twice."""
    if len({full.partition(".")[2] for full in found}) < 2:
        return []
    return [Fault(where, f"{name!r} may be any of {', '.join(found)}", "give the full name")]


def _guess(source: Source, name: str) -> list[tuple[str, ...]]:
    """Dotted names that are this column in everybody's words: one tuple for one key, wherever it stands; several where keys differ."""
    parts = ("config", "metrics") if name in MEASURED else ("config",)
    for part in parts:
        names = [full for full in source.names(part) if any(run.get(full) is not None for run in source.runs)]
        found = [full for word in USUAL[name] for full in names if full.rpartition(".")[2].lower() == word]
        chosen = [full for full in found if full.rpartition(".")[2].lower() == name] or found
        if not chosen:
            continue
        keys: dict[str, tuple[str, ...]] = {}
        for full in chosen:
            key = full.partition(".")[2] or full
            keys[key] = (*keys.get(key, ()), full)
        return [(chosen[0],)] if len(keys) > 1 and _agree(source, chosen) else list(keys.values())
    return []


def _agree(source: Source, names: Sequence[str]) -> bool:
    """Whether every run that has all of `names` has one value, and the first is never the one that is absent."""
    for run in source.runs:
        values = [value for name in names if (value := run.get(name)) is not None]
        if values and (run.get(names[0]) is None or not all(same(values[0], value) for value in values)):
            return False
    return True


def _is_switch(source: Source, name: str, factors: Sequence[Factor]) -> bool:
    """Whether a parametrization's column is a switch named after muP, as in `use_mup: true`."""
    if name != "parametrization" or len(factors) != 1 or isinstance(factors[0], float):
        return False
    names = factors[0]
    values = {str(value).strip().lower() for run in source.runs for full in names if (value := run.get(full)) is not None}
    return "mup" in names[0].rpartition(".")[2].lower() and bool(values) and values <= {*YES, *NO}


def _said(factors: Sequence[Factor]) -> str:
    return " * ".join(f"{factor:.12g}" if isinstance(factor, float) else " or ".join(factor) for factor in factors)


def _have(name: str, columns: Mapping[str, Column], faults: Sequence[Fault]) -> bool:
    """Whether a required column is there, or its absence is told already."""
    told = any(f"column {name!r}" in fault.where or fault.where.startswith(f"--column {name}=") for fault in faults)
    if name == "lr":
        told |= any(fault.where.startswith("--column log2_lr=") for fault in faults)
        return told or "lr" in columns or "log2_lr" in columns
    return told or name in columns


def _missing(source: Source, name: str) -> Fault:
    names = source.names("config")
    cures = [unknown_name("", word, names).cure for word in USUAL[name]]
    near = next((cure for cure in cures if cure.startswith("nearest")), cures[0])
    either = " (or 'log2_lr')" if name == "lr" else ""
    return Fault(f"{source.where}: column {name!r}{either}", "is not among what the runs hold", f"--column {name}=NAME; {near}")


def loss_names(source: Source, metric: str | None) -> tuple[tuple[str, ...], bool]:
    """Dotted names of the metric that is the loss, and whether it was guessed. Raises DataError when there is none, or a choice."""
    names = source.names("metrics")
    if metric is not None:
        found = lookup(metric, names)
        raise_all([unknown_name(f"--loss-metric {metric}", metric, names)] if not found else [], DataError)
        raise_all(_ambiguous(f"--loss-metric {metric}", metric, found), DataError)
        return tuple(found), False
    plain = {full: _plain(full) for full in names}
    found = [full for full, word in plain.items() if word in USUAL_LOSSES[:-1]] or [n for n, w in plain.items() if w == "loss"]
    if len(found) == 1:
        return (found[0],), True
    losses = [full for full in names if "loss" in full.lower()] or names
    what = f"may be any of {', '.join(found)}" if found else "is not said, and no metric is named like a validation loss"
    shown = ", ".join(losses[:12]) + (", ..." if len(losses) > 12 else "")
    raise DataError(Fault(f"{source.where}: the loss", what, f"--loss-metric NAME; there are: {shown}" if losses else ""))


def _plain(full: str) -> str:
    """A metric's name without the part of the source, in small letters with underscores: "metrics.val/loss" -> "val_loss"."""
    head, _, rest = full.partition(".")
    inside = rest if head in METRIC_PARTS else full
    return inside.lower().replace("/", "_").replace("-", "_").replace(".", "_").replace(" ", "_")
