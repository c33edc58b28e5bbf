"""Loss curves under LR schedules: the law's value, public curves, predictions, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.batch_plots import draw_schedules, schedules_info
from analysis.fit import fit
from analysis.schedule_curves import LrSchedule, Terms, load_curves, multi_power
from analysis.schedule_law import fit_multi_power
from analysis.schedule_result import MultiPowerFit
from scaling.config import ScheduleConfig
from scaling.errors import DataError

TRAIN = ("cosine_24000", "constant_24000", "wsdcon_9")
PUBLISHED = {
    25: (3.04045406, 0.52468604, 0.50786857, 363.78751622, 2.06560812, 0.58279013, 0.64142257),
    100: (2.6514477, 0.60115152, 0.45295811, 437.9464276, 2.13245612, 0.59785199, 0.65523644),
}
THETA = np.log([2.5, 0.6, 0.45, 400.0, 2.0, 0.6, 0.65])
WARMUP = 2160


@pytest.fixture(scope="module")
def public() -> Path:
    path = Path(__file__).parents[3] / "shared" / "data" / "multipower_lr_curves_25_100" / "data.csv"
    if not path.exists():
        pytest.skip("no public data beside the repository")
    return path


def published_schedule(name: str) -> np.ndarray:
    """LR of every update, as the data's description defines it."""
    kind, *numbers = name.split("_")
    steps = 16000 if kind == "wsdcon" else int(numbers[-1])
    t, peak, last = np.arange(1, steps + 1, dtype=float), 3e-4, 3e-5
    start = int(numbers[0])
    shapes: dict[str, Callable[[], np.ndarray]] = {
        "cosine": lambda: last + 0.5 * (peak - last) * (1 + np.cos(np.pi * (t - WARMUP) / (steps - WARMUP))),
        "constant": lambda: np.full_like(t, peak),
        "wsd": lambda: np.where(t < start, peak, peak * (last / peak) ** ((t - start) / (steps - start))),
        "wsdld": lambda: np.where(t < start, peak, peak + (last - peak) * (t - start) / (steps - start)),
        "wsdcon": lambda: np.where(t < 8000, peak, start * 1e-5),
    }
    return np.where(t < WARMUP, peak * t / WARMUP, shapes[kind]())


def errors(public: Path, size: int, warmup: bool = True) -> list[float]:
    """Mean |error| of the published parameters on each curve that they were not fitted to."""
    names = sorted(set(pd.read_csv(public)["schedule"]))
    curves, _ = load_curves(public, where=[f"model_m={size}"], schedules={name: published_schedule(name) for name in names})
    theta = np.log(PUBLISHED[size])
    tested = [curve for curve in curves if curve.name not in TRAIN]
    assert len(tested) == 6
    predicted = [multi_power(theta, Terms.of(curve.schedule, 4, warmup), curve.steps)[0] for curve in tested]
    return [float(np.abs(loss - curve.loss).mean()) for loss, curve in zip(predicted, tested, strict=True)]


@pytest.mark.parametrize(("size", "mae"), [(25, 0.00376), (100, 0.00435)])
def test_published_parameters_give_the_published_test_error(public: Path, size: int, mae: float) -> None:
    assert np.mean(errors(public, size)) == pytest.approx(mae, abs=1e-5)


def test_without_the_warm_up_in_the_decay_sum_every_prediction_is_off(public: Path) -> None:
    assert min(errors(public, 25, warmup=False)) > 0.1


def test_own_fit_predicts_other_schedules_about_as_well_as_the_published_one(public: Path) -> None:
    """At 100M better (0.0039 against 0.00435); at 25M worse, which docs/schedule-law.md says."""
    found = fit(public, law="multi-power", where=["model_m=100"], train=",".join(TRAIN), warmup_steps=WARMUP)
    assert found.success
    assert found.test_mae <= 0.00435
    assert [error.name for error in found.left_out] == sorted(TRAIN, key=[c.name for c in found.curves].index)


def naive(theta: np.ndarray, lr: np.ndarray, t: int) -> float:
    """The formula with its two loops."""
    level, scale, alpha, factor, rate, beta, gamma = np.exp(theta)
    loss = level + scale * lr[: t + 1].sum() ** -alpha
    for k in range(1, t + 1):
        since = lr[k : t + 1].sum()
        loss -= factor * (lr[k - 1] - lr[k]) * (1 - (1 + rate * lr[k] ** -gamma * since) ** -beta)
    return float(loss)


def test_the_value_is_that_of_the_double_loop() -> None:
    schedule = LrSchedule.named(ScheduleConfig(kind="wsd", warmup_fraction=0.1, decay_fraction=0.3, final_factor=0.1), 200, 3e-4)
    steps = np.array([5, 60, 150, 199, 200])
    expected = [naive(THETA, schedule.lr, int(t)) for t in steps]
    assert multi_power(THETA, Terms.of(schedule), steps)[0] == pytest.approx(expected, rel=1e-12)
    assert multi_power(THETA, Terms.of(schedule, 4), steps[1:])[0] == pytest.approx(expected[1:], abs=1e-3)


def test_gradients_are_those_of_the_law() -> None:
    schedule, steps = LrSchedule.of(published_schedule("wsdcon_9")[:9000]), np.array([3000, 8500])
    gradient = multi_power(THETA, Terms.of(schedule, 8), steps)[1]
    for index in range(7):
        shift = np.zeros(7)
        shift[index] = 1e-6
        up, down = (multi_power(THETA + sign * shift, Terms.of(schedule, 8), steps)[0] for sign in (1, -1))
        assert gradient[:, index] == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-8)


def test_a_schedule_that_ends_at_zero_has_a_finite_loss() -> None:
    schedule = LrSchedule.of(np.concatenate([np.full(50, 1e-3), [0.0, 0.0]]))
    loss, gradient = multi_power(THETA, Terms.of(schedule), np.array([50, 51, 52]))
    assert np.isfinite(loss).all()
    assert np.isfinite(gradient).all()
    assert loss[1] <= loss[0]


def curves_frame(names: tuple[str, ...], noise: float = 1e-3, every: int = 40) -> pd.DataFrame:
    random, parts = np.random.default_rng(0), []
    for name in names:
        lr = np.interp(
            np.linspace(0, 1, 1601)[1:], np.linspace(0, 1, len(published_schedule(name)) + 1)[1:], published_schedule(name)
        )
        schedule = LrSchedule.of(15 * lr, name)
        steps = np.arange(every, 1601, every)
        steps = np.concatenate([[1], steps])
        loss = multi_power(THETA, Terms.of(schedule), steps)[0] * (1 + noise * random.standard_normal(len(steps)))
        parts.append(pd.DataFrame({"schedule": name, "step": steps, "lr": schedule.lr[steps], "loss": loss}))
    return pd.concat(parts)


@pytest.fixture(scope="module")
def simulated() -> MultiPowerFit:
    names = (*TRAIN, "wsd_20000_24000")
    return fit_multi_power(curves_frame(names), train=TRAIN)


def test_a_schedule_that_was_not_fitted_is_predicted_within_its_interval(simulated: MultiPowerFit) -> None:
    curve = next(curve for curve in simulated.curves if curve.name == "wsd_20000_24000")
    found = simulated.predict(curve.schedule, curve.steps)
    truth = multi_power(THETA, Terms.of(curve.schedule), curve.steps)[0]
    assert found.low[-1] < truth[-1] < found.high[-1]
    assert simulated.test_mae < 0.01


def test_two_schedules_are_compared_with_an_interval(simulated: MultiPowerFit) -> None:
    found = simulated.compare("wsdcon_9", "wsd_20000_24000")
    assert found.difference.value == pytest.approx(found.first.final.value - found.second.final.value)
    low, high = found.difference.interval
    assert low < found.difference.value < high
    assert (found.better is None) == (low <= 0 <= high)


def test_named_schedules_are_those_of_the_trainer_and_other_peaks_are_flagged(simulated: MultiPowerFit) -> None:
    schedule = LrSchedule.named(ScheduleConfig(kind="cosine", final_factor=0.1), 1600, 9e-3)
    assert schedule.steps == 1600
    assert schedule.lr[160] == pytest.approx(9e-3)
    assert any("peak LR 0.009" in flag for flag in simulated.predict(schedule).flags)


def test_the_plot_separates_fitted_from_predicted(simulated: MultiPowerFit) -> None:
    from matplotlib.figure import Figure

    ax, rates = Figure().subplots(1, 2)
    draw_schedules(ax, schedules_info(simulated), rates)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "wsd_20000_24000 (predicted)" in labels
    assert "wsdcon_9 (fitted)" in labels
    assert rates.get_ylabel() == "learning rate"


def test_an_unknown_warm_up_is_asked_for() -> None:
    table = curves_frame(("constant_24000",))
    with pytest.raises(DataError, match="give warmup_steps"):
        fit_multi_power(table[table["step"] > 1])


def test_two_models_are_not_one_curve() -> None:
    table = curves_frame(("constant_24000",))
    with pytest.raises(DataError, match="several rows of one step"):
        fit_multi_power(pd.concat([table, table.assign(loss=table["loss"] + 0.1)]))


def test_fewer_than_three_curves_leave_the_laws_error_unknown() -> None:
    found = fit_multi_power(curves_frame(("constant_24000", "cosine_24000")))
    assert any("cannot be measured" in flag for flag in found.flags)
    assert np.isnan(found.predict("cosine_24000").final.interval).all()
    assert not found.trusted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train": "cosine_2400"}, "nearest: cosine_24000"),
        ({"shape_sd": 0}, "is not positive"),
        ({"warmup": 3}, "nearest: warmup_steps"),
    ],
)
def test_wrong_options_name_the_cure(options: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        fit_multi_power(curves_frame(("cosine_24000",)), **options)
