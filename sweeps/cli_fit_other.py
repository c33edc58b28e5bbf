"""`mutransfer fit TABLE --law critical-batch | lr-batch | multi-power`: options of these laws, their predictions, one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaling.errors import ConfigError, DataError, Fault, raise_all
from sweeps.cli_common import NOT_OK, OK, answer

if TYPE_CHECKING:
    from analysis.schedule_curves import LrSchedule
    from analysis.schedule_result import CurvePrediction, MultiPowerFit

OTHER_LAWS = ("critical-batch", "lr-batch", "multi-power")
"""As in analysis.fit_search, which is not imported before it is needed: `--help` is fast. A test holds the two together."""
NAMED = ("steps", "peak_lr")
"""What a named schedule of scaling.schedule needs beside its own keys."""


def pairs(option: str, texts: Sequence[str], example: str) -> dict[str, Any]:
    """{"window": 0.01} from "window=0.01"; numbers are numbers. Raises ConfigError."""
    faults, found = [], {}
    for text in texts:
        name, separator, value = (part.strip() for part in text.partition("="))
        if not separator or not name or not value:
            faults.append(Fault(f"{option} {text}", "is not of the form NAME=VALUE", f"for example {option} {example}"))
        elif name in found:
            faults.append(Fault(f"{option} {text}", f"{name!r} is given twice", "leave one out"))
        found[name] = _number(value)
    raise_all(faults, ConfigError)
    return found


def _number(text: str) -> Any:
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value == value and abs(value) < 1e15 and value == int(value) else value


def unread_faults(law: str, given: Mapping[str, Any]) -> list[Fault]:
    """Options of the command that this law has no use for; given: {option: its value, None or empty where not given}."""
    return [Fault(name, f"does not apply to the law {law}", "leave it out") for name, value in given.items() if value]


def answer_other(
    table: Path, law: str, fitting: Mapping[str, Any], options: Sequence[str], predict: Sequence[str], save: Path | None, json: bool
) -> int:  # fmt: skip
    """Fit, predict, answer. fitting: further arguments of `analysis.fit.fit`; options: of the law, as NAME=VALUE; predict: as typed."""
    from analysis.other_laws import fit_other

    result: Any = fit_other(table, law, **fitting, **pairs("--option", options, "window=0.01"))
    compared = []
    if law == "multi-power":
        predictions: list[Any] = [_curve(result, text) for text in predict]
        compared = [result.compare(predictions[0].schedule, other.schedule) for other in predictions[1:]]
    else:
        predictions = [result.predict(**_sizes(text)) for text in predict]
    if save is not None:
        result.save(save)
    document = result.to_dict()
    document["predictions"] = [prediction.to_dict() for prediction in predictions]
    document["comparisons"] = [comparison.to_dict() for comparison in compared]
    flags = [flag for prediction in predictions for flag in prediction.flags]
    document["flags"] += flags
    document["trusted"] = document["trusted"] and not flags
    answer(document, lambda: "\n".join(map(str, [result, *predictions, *compared])), json)
    return OK if document["trusted"] else NOT_OK


def _sizes(text: str) -> dict[str, Any]:
    return pairs("--predict", [part for part in text.split(",") if part.strip()], "params=7e9,tokens=1.4e11")


def _curve(result: MultiPowerFit, text: str) -> CurvePrediction:
    """A prediction for "schedule=NAME", "file=lr.csv" (a column lr, one row a step) or "kind=wsd,steps=24000,peak_lr=3e-4,...\""""
    given = pairs("--predict", [part for part in text.split(",") if part.strip()], "kind=cosine,steps=24000,peak_lr=3e-4")
    if set(given) == {"schedule"}:
        return result.predict(str(given["schedule"]))
    return result.predict(_from_file(str(given["file"])) if set(given) == {"file"} else _named(text, given))


def _from_file(path: str) -> LrSchedule:
    from analysis.schedule_curves import LrSchedule
    from analysis.table import numbers_of, read_frame

    frame, place = read_frame(path, None, [])
    faults: list[Fault] = []
    if "lr" not in frame:
        raise DataError(Fault(f"{place}: column 'lr'", "is missing", "one row a step, from the first update on"))
    values = numbers_of(frame["lr"], "learning rate", place, faults).to_numpy(float)
    raise_all(faults, DataError)
    return LrSchedule.of(values, Path(path).name)


def _named(text: str, given: Mapping[str, Any]) -> LrSchedule:
    from analysis.schedule_curves import LrSchedule
    from scaling.config import ScheduleConfig
    from scaling.config_file import ConfigSource, build

    missing = [name for name in NAMED if not isinstance(given.get(name), (int, float))]
    if missing:
        cure = "for example kind=wsd,steps=24000,peak_lr=3e-4,warmup_fraction=0.09,decay_fraction=0.17,final_factor=0.1"
        raise ConfigError(
            Fault(f"--predict {text}", f"gives no number for {' and '.join(missing)}", f"{cure}; or schedule=NAME, or file=PATH")
        )
    values = {name: value for name, value in given.items() if name not in NAMED}
    schedule = build(ScheduleConfig, ConfigSource(values, f"--predict {text}"))
    return LrSchedule.named(schedule, int(given["steps"]), float(given["peak_lr"]))
