"""Laws of the best learning rate and batch: public grids, known surfaces, edges, what is refused, predictions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.batch_plots import bottom_info, draw_bottoms, draw_law, law_info
from analysis.batch_simulation import BATCH_EXPONENTS, LR_EXPONENTS, optimum, simulate_frame, simulate_grid
from analysis.batch_table import load_lr_batch_table
from analysis.fit import fit
from analysis.lr_batch_law import fit_lr_batch
from analysis.lr_batch_result import LrBatchFit
from analysis.lr_batch_score import Score
from analysis.lr_batch_surface import Surface
from scaling.errors import DataError

SCALING = Path(__file__).parents[1] / "fixtures" / "scaling.csv"
COLUMNS = {"params": "N", "tokens": "D", "final_lr": "min_lr"}
FAST = {"draws": 20, "left_out": False}


@pytest.fixture(scope="module")
def steplaw() -> Path:
    path = Path(__file__).parents[3] / "shared" / "data" / "steplaw_dense" / "data.csv"
    if not path.exists():
        pytest.skip("no public data beside the repository")
    return path


@pytest.fixture(scope="module")
def joint(steplaw: Path) -> LrBatchFit:
    return fit(steplaw, law="lr-batch", columns=COLUMNS, draws=20)


@pytest.fixture(scope="module")
def grid() -> LrBatchFit:
    return fit_lr_batch(simulate_grid(np.random.default_rng(0), 9, noise=3e-4, scatter=0.02), draws=40)


def test_our_law_loses_no_more_than_the_published_one(joint: LrBatchFit) -> None:
    scores = {score.name: score for score in joint.scores}
    published = scores["Step Law (2503.04715)"]
    assert published.mean <= 0.0007
    assert published.largest == pytest.approx(0.0018, abs=1e-4)
    for name in ("this law", "this law, each size predicted from the others"):
        assert scores[name].mean < published.mean
        assert scores[name].cells == 17


def test_the_shipped_procedure_gives_its_own_exponents_and_not_the_published_ones(steplaw: Path) -> None:
    both = fit_lr_batch(steplaw, columns=COLUMNS, method="two-stage", **FAST).best_values
    alone = fit_lr_batch(steplaw, columns=COLUMNS, method="two-stage", batch_by="tokens", **FAST).best_values
    found = [both["lr_params_exponent"], both["lr_tokens_exponent"], both["batch_params_exponent"], both["batch_tokens_exponent"]]
    assert found == pytest.approx([-0.766, 0.197, -0.266, 0.623], abs=0.002)
    assert alone["batch_tokens_exponent"] == pytest.approx(0.613, abs=0.002)
    assert abs(both["lr_tokens_exponent"] - 0.307) > 0.05


def test_raw_last_step_losses_move_most_best_runs_and_are_not_trusted(steplaw: Path, joint: LrBatchFit) -> None:
    raw = fit_lr_batch(steplaw, columns={**COLUMNS, "loss": "loss_final_step"}, **FAST)
    moved = sum(np.abs(a.best - b.best).max() > 1e-6 for a, b in zip(joint.runs.cells, raw.runs.cells, strict=True))
    assert moved == 15
    assert joint.surface is not None
    assert raw.surface is not None
    assert raw.surface.noise > 2 * joint.surface.noise
    assert not raw.success


def test_plateaus_and_the_ridge_are_those_of_the_public_grids(joint: LrBatchFit) -> None:
    tenth = {plateau.knob: plateau for plateau in joint.plateaus if plateau.share == 0.001}
    assert (tenth["lr"].above / tenth["lr"].below) ** 0.5 == pytest.approx(1.48, abs=0.06)
    assert (tenth["batch_tokens"].above / tenth["batch_tokens"].below) ** 0.5 == pytest.approx(1.50, abs=0.06)
    assert joint.ridge is not None
    assert 0.3 < joint.ridge.value < 0.5


def test_a_known_law_is_recovered_through_an_asymmetric_bottom(grid: LrBatchFit) -> None:
    found = [grid.best_values[f"{name}_exponent"] for name in ("lr_params", "lr_tokens", "batch_params", "batch_tokens")]
    assert found == pytest.approx([*LR_EXPONENTS, *BATCH_EXPONENTS], abs=0.05)
    lr, batch = optimum(1e9, 5e10)
    prediction = grid.predict(params=1e9, tokens=5e10).knobs
    assert prediction["lr"].value == pytest.approx(lr, rel=0.08)
    assert prediction["batch_tokens"].value == pytest.approx(batch, rel=0.08)


@pytest.mark.parametrize(("knob", "exponents"), [("lr", LR_EXPONENTS), ("batch_tokens", BATCH_EXPONENTS)])
def test_one_knob_alone_is_enough(knob: str, exponents: tuple[float, float]) -> None:
    short = {"lr": "lr", "batch_tokens": "batch"}[knob]
    found = fit_lr_batch(simulate_grid(np.random.default_rng(1), 12, 2e-4, 0.02, (knob,)), window=0.03, **FAST)
    assert set(found.params) == {f"{short}_{name}" for name in ("k", "params_exponent", "tokens_exponent")}
    values = [found.best_values[f"{short}_{name}_exponent"] for name in ("params", "tokens")]
    assert values == pytest.approx(exponents, abs=0.08)


def cut(frame: pd.DataFrame, keep_below: float) -> pd.DataFrame:
    """The first size's grid ends below its best learning rate."""
    first = frame["params"].iloc[0]
    best = optimum(first, frame["tokens"].iloc[0])[0]
    return frame[(frame["params"] != first) | (frame["lr"] < keep_below * best)]


def test_a_best_run_at_an_edge_is_a_bound_and_never_extrapolated() -> None:
    frame = cut(simulate_frame(np.random.default_rng(0), 9, 3e-4, 0.02), 0.4)
    found = fit_lr_batch(frame, **FAST)
    edge = next(item for item in found.optima if item.sizes["params"] == frame["params"].iloc[0])
    largest = frame.loc[frame["params"] == frame["params"].iloc[0], "lr"].max()
    assert edge.censored["lr"] == "high"
    assert edge.knobs["lr"].value == pytest.approx(largest)
    assert edge.knobs["lr"].interval == pytest.approx((largest, np.inf))
    assert any("1 of 9 sizes have their best run at an edge" in flag for flag in found.flags)
    assert found.best_values["lr_params_exponent"] == pytest.approx(LR_EXPONENTS[0], abs=0.06)


def test_only_edges_are_refused() -> None:
    frame = simulate_frame(np.random.default_rng(0), 4, 3e-4, 0.02)
    low = frame.groupby("params")["lr"].transform("min")
    with pytest.raises(DataError, match="best run is not at an edge"):
        fit_lr_batch(frame[frame["lr"] <= 2 * low], **FAST)


def test_a_constant_ratio_of_tokens_refuses_both_exponents() -> None:
    frame = simulate_frame(np.random.default_rng(2), 6, 3e-4, 0.02)
    frame["tokens"] = 20 * frame["params"]
    with pytest.raises(DataError, match="their exponents are not separable"):
        fit_lr_batch(frame, by="params,tokens", **FAST)
    found = fit_lr_batch(frame, **FAST)
    assert found.line.regressors == ("flops",)
    assert any("20 times params at every size" in flag and "refused" in flag for flag in found.flags)


def test_one_size_of_model_refuses_its_exponent() -> None:
    frame = simulate_frame(np.random.default_rng(2), 6, 3e-4, 0.02).assign(params=1e9)
    with pytest.raises(DataError, match="has one level"):
        fit_lr_batch(frame, by="params", **FAST)
    found = fit_lr_batch(frame, **FAST)
    assert found.line.regressors == ("tokens",)
    assert "lr_params_exponent" not in found.params
    with pytest.raises(DataError, match="does not read it"):
        found.predict(params=1e9, tokens=1e10)


def test_runs_with_different_final_learning_rates_are_not_pooled() -> None:
    frame = simulate_frame(np.random.default_rng(2), 3, 3e-4, 0.02)
    with pytest.raises(DataError, match="different final learning rates are not pooled"):
        load_lr_batch_table(frame.assign(final_lr=np.where(np.arange(len(frame)) % 2, 1e-5, 1e-4)))
    with pytest.raises(DataError, match="column 'schedule'"):
        load_lr_batch_table(frame.assign(schedule=np.where(np.arange(len(frame)) % 2, "cosine", "wsd")))
    load_lr_batch_table(frame.assign(final_lr=0.1 * frame["lr"]))


def test_diverged_runs_move_the_boundary_and_not_the_optimum() -> None:
    frame = simulate_frame(np.random.default_rng(4), 6, 3e-4, 0.02).assign(status="complete")
    before = fit_lr_batch(frame, **FAST)
    high = frame.groupby("params")["lr"].transform("max")
    lost = frame.assign(status=np.where(frame["lr"] == high, "diverged", "complete"))
    after = fit_lr_batch(lost, **FAST)
    assert after.best_values == pytest.approx(before.best_values, rel=1e-6)
    assert after.divergence is not None
    assert before.divergence is not None
    assert len(after.divergence.above) > len(before.divergence.above)
    assert after.divergence.above.max() == pytest.approx(high.max())
    assert any("diverged runs kept for the boundary of divergence" in note for note in after.notes)


def test_a_prediction_says_how_far_it_lies_and_follows_a_given_batch(grid: LrBatchFit) -> None:
    assert any("beyond x10" in flag for flag in grid.predict(params=1e12, tokens=1e10).flags)
    best = grid.predict(params=1e9, tokens=2e10).knobs
    smaller = grid.predict(params=1e9, tokens=2e10, batch_tokens=best["batch_tokens"].value / 2).knobs["lr"]
    assert 0.5 < smaller.value / best["lr"].value < 0.9


def test_the_plateau_of_a_parabola_is_its_root() -> None:
    surface = Surface(np.zeros(1), np.zeros((1, 1)), np.array([[0.1]]), np.zeros(1), 0.0)
    assert surface.plateau(0, 0.001, 3.0) == pytest.approx((np.sqrt(0.2), np.sqrt(0.2)), abs=0.002)
    assert surface.plateau(0, 1.0, 3.0) == (np.inf, np.inf)


def test_text_html_and_json_hold_the_scores(grid: LrBatchFit) -> None:
    assert "each size predicted from the others" in str(grid)
    assert "<table>" in grid._repr_html_()
    document = grid.to_dict()
    assert {"law", "params", "objective", "starts", "success", "trusted", "flags", "scores", "optima"} <= set(document)
    assert document["starts"]["at_optimum"] >= 1


def test_plots_mark_optima_and_edges() -> None:
    from matplotlib.figure import Figure

    frame = cut(simulate_frame(np.random.default_rng(0), 5, 3e-4, 0.02), 0.4)
    found = fit_lr_batch(frame, by="params", **FAST)
    left, right = Figure().subplots(1, 2)
    draw_bottoms(left, bottom_info(found))
    draw_law(right, law_info(found, "lr", "params"))
    assert left.get_xlabel() == "peak learning rate"
    assert any(line.get_marker() == ">" for line in left.lines)
    assert any(line.get_marker() == "^" for line in right.lines)
    assert right.get_yscale() == "log"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "three-stage"}, "choose from: joint, two-stage"),
        ({"window": 2}, "out of range"),
        ({"by": "width"}, "is no list of sizes"),
        ({"windw": 0.1}, "nearest: window"),
    ],
)
def test_wrong_options_name_the_cure(options: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        fit_lr_batch(simulate_grid(np.random.default_rng(0), 3), **options)


def test_a_size_that_is_read_below_its_best_run_pays_for_no_other() -> None:
    score = Score.of("law", "", np.array([0.02, -0.01, np.nan]))
    assert score.mean == pytest.approx(0.01)
    assert (score.cells, score.outside, score.below) == (2, 1, 1)


def test_sizes_that_do_not_search_the_batch_are_named() -> None:
    with pytest.raises(DataError, match="19 of 20 sizes have one batch_tokens: keep one with --where"):
        fit(SCALING, law="lr-batch")
    assert fit(SCALING, law="lr-batch", where=["batch_tokens=2048"], draws=20, left_out=False).success
