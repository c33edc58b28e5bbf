"""Fits with a known answer: gradients, recovery, public tables, what mean or sum changes, guards, saving."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.fit import ScalingLawFit, fit, load_fit
from analysis.fit_engine import Loss, minimise
from analysis.fit_simulation import LARGE, TRUTH, Design, simulate, true_loss, true_optimum
from analysis.fit_table import FitTable, load_fit_table
from analysis.laws import LAWS, Inputs
from scaling.errors import DataError

EPOCH_COLUMNS = {"params": "N", "tokens": "D", "flops": "C"}


@pytest.fixture(scope="module")
def epoch() -> FitTable:
    path = Path(__file__).parents[3] / "shared" / "data" / "chinchilla_epoch" / "data.csv"
    if not path.exists():
        pytest.skip("no public data beside the repository")
    return load_fit_table(path, EPOCH_COLUMNS, where=["epoch_excluded=0"])


@pytest.fixture(scope="module")
def epoch_fit(epoch: FitTable) -> ScalingLawFit:
    return fit(epoch)


def columns_of(count: int = 40) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    params, tokens = 10 ** random.uniform(7, 10, count), 10 ** random.uniform(9, 11.5, count)
    unique = tokens / random.choice([1.0, 1.0, 3.0, 10.0, 40.0], count)
    experts = random.choice([2.0, 8.0, 64.0], count)
    return {"params": params, "tokens": tokens, "flops": 6 * params * tokens, "unique_tokens": unique, "experts": experts}


@pytest.mark.parametrize("name", LAWS)
def test_gradients_are_those_of_the_law(name: str) -> None:
    law, x = LAWS[name], Inputs.of(columns_of())
    low, high = law.bounds(2.0, x)
    random = np.random.default_rng(1)
    seeds = np.array([law.assemble(shape, np.full(3, 0.4), 2.0)[: len(law.parameters)] for shape in law.shapes(x)[::7]])
    theta = np.clip(seeds + 0.02 * random.standard_normal(seeds.shape), low, high)
    _, gradient = law.value(theta, x)
    for index in range(theta.shape[1]):
        step = np.zeros(theta.shape[1])
        step[index] = 1e-6
        numeric = (law.value(theta + step, x)[0] - law.value(theta - step, x)[0]) / 2e-6
        assert gradient[:, :, index] == pytest.approx(numeric, rel=2e-4, abs=1e-6 * np.abs(numeric).max() + 1e-9)


TRUTHS = {
    "power": {"A": 40.0, "alpha": 0.12},
    "power-constant-tokens": {"E": 1.7, "A": 900.0, "alpha": 0.33},
    "chinchilla": {"E": 1.8, "A": 480.0, "B": 2000.0, "alpha": 0.35, "beta": 0.37},
    "chinchilla-shared": {"E": 1.8, "A": 480.0, "B": 1500.0, "alpha": 0.35},
    "kaplan": {"N_c": 8.8e13, "D_c": 5.4e13, "alpha_N": 0.076, "alpha_D": 0.095},
    "farseer-like": {"E": 1.8, "A": 480.0, "B": 0.24, "alpha": 0.35, "beta": 0.37, "kappa": 0.05, "gamma": 0.04},
    "data-constrained": {"E": 1.87, "A": 521.0, "B": 1488.0, "alpha": 0.353, "beta": 0.36, "R_N": 5.3, "R_D": 15.4},
    "moe": {"a": -0.081, "b": -0.092, "c": 0.0079, "d": 1.086},
}


def truth_loss(name: str, columns: dict[str, np.ndarray], v: dict[str, float]) -> np.ndarray:
    """The laws as papers write them, apart from analysis.laws."""
    n, d, u, x = (columns[key] for key in ("params", "tokens", "unique_tokens", "experts"))
    if name == "power":
        return v["A"] * n ** -v["alpha"]
    if name == "power-constant-tokens":
        return v["E"] + v["A"] * d ** -v["alpha"]
    if name == "kaplan":
        return ((v["N_c"] / n) ** (v["alpha_N"] / v["alpha_D"]) + v["D_c"] / d) ** v["alpha_D"]
    if name == "moe":
        return 10 ** (v["a"] * np.log10(n) + v["b"] * np.log10(x) + v["c"] * np.log10(n) * np.log10(x) + v["d"])
    if name == "farseer-like":
        exponent = v["beta"] * (n / 1e9) ** v["gamma"]
        return v["E"] + v["A"] * n ** -v["alpha"] + v["B"] * (n / 1e9) ** v["kappa"] * (d / 2e10) ** -exponent
    alpha, beta = v["alpha"], v.get("beta", v["alpha"])
    if name == "data-constrained":
        g = (alpha * v["A"] / (beta * v["B"])) ** (1 / (alpha + beta))
        fed = np.minimum(g * (u * g) ** (beta / alpha), n)
        d = u + u * v["R_D"] * (1 - np.exp(-(d / u - 1) / v["R_D"]))
        n = fed + fed * v["R_N"] * (1 - np.exp(-(n / fed - 1) / v["R_N"]))
    return v["E"] + v["A"] * n**-alpha + v["B"] * d**-beta


@pytest.mark.parametrize("name", TRUTHS)
def test_a_law_without_noise_is_found(name: str) -> None:
    columns = columns_of(60)
    table = FitTable(columns, truth_loss(name, columns, TRUTHS[name]))
    found = fit(table, name, loss="least-squares-log")
    assert found.success
    assert found.best_values == pytest.approx(TRUTHS[name], rel=1e-3)


def test_the_farseer_like_law_is_chinchillas_where_its_own_parameters_are_zero() -> None:
    law, n, d = LAWS["farseer-like"], np.array([1e8, 3e9]), np.array([4e9, 5e11])
    x = Inputs.of({"params": n, "tokens": d})
    theta = np.array([[0.5, -0.4, -0.8, 0.35, 0.37, 0.0, 0.0]])
    assert law.value(theta, x)[0] == pytest.approx(LAWS["chinchilla"].value(theta[:, :5], x)[0])
    split, bent = (law.optimum(np.array([[*theta[0, :6], gamma]]), x.centres, np.log(1e20)) for gamma in (0.0, 0.05))
    assert split == pytest.approx(LAWS["chinchilla"].optimum(theta[:, :5], x.centres, np.log(1e20)))
    sizes = np.exp(np.linspace(-3, 3, 20001) + bent)
    losses = law.value(np.array([[*theta[0, :6], 0.05]]), Inputs.of({"params": sizes, "tokens": 1e20 / sizes}, x.centres))[0][0]
    assert np.log(sizes[losses.argmin()]) == pytest.approx(float(bent[0]), abs=1e-3)


def test_epochs_points_give_the_published_huber_optimum(epoch_fit: ScalingLawFit) -> None:
    assert len(epoch_fit.table) == 240
    assert epoch_fit.objective <= 0.0010183
    values = epoch_fit.best_values
    assert [values["E"], values["alpha"], values["beta"]] == pytest.approx([1.8172, 0.34731, 0.36717], abs=5e-4)
    assert np.log([values["A"], values["B"]]) == pytest.approx(np.log([477.83, 2143.4]), abs=5e-3)
    assert epoch_fit.trusted
    assert epoch_fit.starts.at_optimum > 0.5 * epoch_fit.starts.total


def test_epochs_headline_is_the_l1_optimum(epoch: FitTable) -> None:
    found = fit(epoch, loss="l1-log", starts=8)
    values = found.best_values
    assert [values["E"], values["alpha"], values["beta"]] == pytest.approx([1.81686, 0.34781, 0.36585], abs=5e-4)
    assert np.log([values["A"], values["B"]]) == pytest.approx(np.log([481.995, 2085.39]), abs=5e-3)
    assert found.objective == pytest.approx(1.12949, abs=1e-5)


def test_outliers_that_move_the_fit_are_flagged(shared_data: Path, epoch_fit: ScalingLawFit) -> None:
    """The five points that the published fit leaves out move beta from .367 to .453."""
    found = fit(shared_data / "chinchilla_epoch" / "data.csv", columns=EPOCH_COLUMNS)
    assert found.best_values["beta"] == pytest.approx(0.453049, abs=5e-4)
    assert any("rows of the largest residuals" in flag for flag in found.flags)
    assert not any("largest residuals" in flag for flag in epoch_fit.flags)


def test_epochs_bootstrap_has_the_published_spread(epoch_fit: ScalingLawFit) -> None:
    draws = epoch_fit.bootstrap("pairs", 400)
    assert draws.failed == 0
    assert draws.stderr == pytest.approx({"E": 0.0281, "A": 119, "B": 1325, "alpha": 0.0148, "beta": 0.0209}, rel=0.15)


def test_epochs_least_squares_matches_an_independent_fit(epoch: FitTable) -> None:
    logs = fit(epoch, loss="least-squares-log").best_values
    assert logs == pytest.approx({"E": 1.86455, "A": 593.32, "B": 4875.6, "alpha": 0.360253, "beta": 0.405883}, rel=2e-5)
    raw = fit(epoch, loss="least-squares").best_values
    assert raw == pytest.approx({"E": 1.88281, "A": 567.8, "B": 7581.9, "alpha": 0.357615, "beta": 0.427621}, rel=2e-5)


def test_epochs_split_and_prediction(epoch_fit: ScalingLawFit) -> None:
    split = epoch_fit.optimal(5.88e23)
    assert split.tokens.value / split.params.value == pytest.approx(17.9, abs=0.1)
    prediction = epoch_fit.predict(params=7e10, tokens=1.4e12)[0]
    assert prediction.loss.value == pytest.approx(1.9734, abs=2e-4)
    assert prediction.loss.interval[0] < 1.9734 < prediction.loss.interval[1]


def test_gadres_extrapolation_errors(shared_data: Path) -> None:
    """Five small RedPajama runs, least squares of the loss, one exponent: the two large ones as published."""
    frame = pd.read_csv(shared_data / "gadre_overtrain" / "data.csv")
    frame = frame[frame["dataset"] == "rpj"].rename(columns={"N": "params", "D": "tokens", "loss_c4_val": "loss"})
    n, m, sizes = frame["params"], frame["token_multiplier"], sorted(frame["params"].unique())
    small = frame[((m == 20) & n.isin(sizes[:4])) | ((n == sizes[0]) & (m == 320))]
    found = fit(small[["params", "tokens", "loss"]], "chinchilla-shared", loss="least-squares")
    targets = frame[((n == sizes[4]) & (m == 640)) | (n == sizes[5])]
    errors = np.abs(found.losses(params=targets["params"], tokens=targets["tokens"]) / targets["loss"] - 1)
    assert len(small) == 5
    assert 100 * errors.to_numpy() == pytest.approx([0.7103, 0.7320], abs=1e-3)


def test_routing_law_matches_an_independent_fit(shared_data: Path) -> None:
    found = fit(
        shared_data / "routing_moe_sbase_dense" / "data.csv",
        "moe",
        loss="least-squares-log",
        columns={"params": "N_dense", "experts": "num_experts"},
        where=["router_type=S-Base", "k=1", "routing_frequency=0.5"],
    )
    assert found.best_values == pytest.approx({"a": -0.08098, "b": -0.09197, "c": 0.007868, "d": 1.08630}, abs=5e-5)


def test_repeated_data_is_reported_as_weakly_identified(shared_data: Path) -> None:
    path = shared_data / "datablations_repeat" / "data.csv"
    columns = {"params": "N", "tokens": "D", "unique_tokens": "U"}
    frame = pd.read_csv(path)
    few = frame[(frame["kind"] == "fit") & (frame["N"] <= frame["U"]) & (frame["epochs"] <= 60) & (frame["loss"] < 4.5)]
    found = fit(few, "data-constrained", columns=columns, starts=12)
    assert len(found.table) == 89
    assert not found.trusted
    assert any("R_D: weakly identified" in flag for flag in found.flags)


@pytest.mark.parametrize("loss", ["huber-log", "least-squares-log", "huber"])
def test_mean_and_sum_give_the_same_answer(loss: str) -> None:
    table = simulate(Design(50, loss), np.random.default_rng(3))
    whole = fit(table, loss=loss)
    mean = fit(table, loss=loss, weights=np.full(50, 1 / 50))
    tiny = fit(table, loss=loss, weights=np.full(50, 1e-9))
    assert mean.best_values == pytest.approx(whole.best_values, rel=1e-6)
    assert tiny.best_values == pytest.approx(whole.best_values, rel=1e-6)
    assert mean.stderr == pytest.approx(whole.stderr, rel=1e-5)
    assert mean.objective == pytest.approx(whole.objective / 50, rel=1e-9)


def test_the_descent_itself_stops_without_a_scale() -> None:
    """The batch's stopping rule, with a factor on the objective that would end L-BFGS at its default tolerances."""
    table, law = simulate(Design(16, "huber-log"), np.random.default_rng(0)), LAWS["chinchilla"]
    x = Inputs.of({name: table.columns[name] for name in law.columns})
    start = np.array([[0.5, -0.5, -0.5, 0.3, 0.3]])
    bounds = law.bounds(float(table.loss.min()), x)
    ends = [
        minimise(law, x, table.loss, np.full(16, scale), start, Loss("huber-log", 1e-3), bounds).theta for scale in (1.0, 1e-8)
    ]
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


def test_mistakes_of_int64_cannot_happen() -> None:
    params = np.array([10**9, 4 * 10**9, 16 * 10**9, 64 * 10**9], dtype=np.int64)
    frame = pd.DataFrame({"params": params, "tokens": 10 * params, "loss": [3.0, 2.8, 2.6, 2.5]})
    table = load_fit_table(frame)
    assert table.columns["flops"].tolist() == [6.0 * float(n) * 10 * float(n) for n in params]
    assert any("no column flops: 6 x params x tokens" in note for note in table.notes)


def sized(**more: object) -> pd.DataFrame:
    return pd.DataFrame({"params": [1e8, 2e8, 4e8], "tokens": [1e9, 4e9, 2e9], "loss": [3.0, 2.8, 2.7], **more})


def test_what_params_count_is_asked_for_where_it_is_not_stated() -> None:
    unknown, stated = load_fit_table(sized()), load_fit_table(sized(), params_include="non-embedding")
    assert unknown.conventions == {"params": "not stated", "flops": "6 x params x tokens"}
    assert any("--params-include embedding or non-embedding" in note for note in unknown.notes)
    assert stated.conventions["params"] == "non-embedding"
    assert any("params leave embeddings out" in note for note in stated.notes)
    with pytest.raises(DataError, match="choose from: embedding, non-embedding"):
        load_fit_table(sized(), params_include="all")


def test_a_flop_count_that_is_not_6nd_is_said_with_its_range() -> None:
    """Counts of attention or embeddings, and names that count a third, differ by size."""
    plain = 6 * sized()["params"] * sized()["tokens"]
    far = load_fit_table(sized(flops=plain * np.array([0.93, 1.1, 1.35])))
    near = load_fit_table(sized(flops=plain * np.array([1.0, 1.02, 1.04])))
    assert far.conventions["flops"] == "0.93 to 1.35 times 6 x params x tokens"
    assert any("0.93 to 1.35 times 6 x params x tokens: more than 10 % apart" in note for note in far.notes)
    assert near.conventions["flops"] == "1 to 1.04 times 6 x params x tokens"
    assert not any("apart" in note for note in near.notes)


def test_every_row_left_out_is_counted() -> None:
    rows = [
        {
            "params": 1e8 * 2**i,
            "tokens": 1e9 * 3 ** (i % 4),
            "loss": 3 - 0.1 * i,
            "lr": 0.01,
            "status": "complete",
            "run_id": f"r{i}",
        }
        for i in range(8)
    ]
    rows += [
        rows[0],
        {**rows[1], "loss": 9.0, "status": "diverged"},
        {**rows[2], "status": "running"},
        {**rows[3], "loss": math.nan, "run_id": "nan"},
        {**rows[4], "lr": 0.02, "loss": 2.9, "run_id": "worse"},
        {**rows[5], "loss": -1.0, "run_id": "negative"},
        {**rows[6], "params": math.nan, "run_id": "none"},
    ]
    table = load_fit_table(pd.DataFrame(rows))
    assert len(table) == 8
    for count, words in ((1, "diverged"), (1, "not finished"), (1, "NaN"), (1, "repeat another"), (1, "other learning rates")):
        assert any(note.startswith(f"{count} ") and words in note for note in table.notes), (words, table.notes)
    assert any("not positive" in note for note in table.notes)
    assert any("without a size" in note for note in table.notes)


def test_checkpoints_of_a_run_count_once() -> None:
    frame = pd.DataFrame({"params": [1e8] * 3 + [2e8] * 3, "tokens": [1e9, 2e9, 3e9] * 2, "loss": [4, 3.5, 3.2, 3.9, 3.3, 3.0]})
    frame = frame.assign(step=[1, 2, 3] * 2, run_id=["a"] * 3 + ["b"] * 3)
    table = load_fit_table(frame)
    assert table.loss.tolist() == [3.2, 3.0]
    assert any(note.startswith("4 earlier checkpoints dropped") for note in table.notes)


def test_bits_become_nats() -> None:
    frame = pd.DataFrame({"params": [1e8, 2e8], "loss": [3.0, 2.0]})
    assert load_fit_table(frame, loss_unit="bits").loss == pytest.approx(np.log(2) * np.array([3.0, 2.0]))


def grid(params: list[float], tokens: list[float], noise: float = 0.003) -> FitTable:
    n, d = (part.ravel() for part in np.meshgrid(params, tokens))
    loss = true_loss(n, d) * np.exp(noise * np.random.default_rng(0).standard_normal(len(n)))
    return FitTable({"params": n, "tokens": d}, loss)


def test_a_good_table_has_no_flags() -> None:
    found = fit(grid([1e8, 3e8, 1e9, 3e9, 1e10], [2e9, 1e10, 5e10, 2e11]))
    assert found.flags == ()
    assert found.trusted


@pytest.mark.parametrize(
    ("params", "tokens", "words"),
    [
        ([1e9], [1e9, 3e9, 1e10, 3e10, 1e11, 3e11], "one level of params"),
        ([1e8, 1e9, 1e10], [1e10, 1e11], "2 levels of tokens"),
        ([1e8, 2e8, 4e8, 8e8], [1e9, 1e10, 1e11], "params spans a factor of 8"),
    ],
)
def test_tables_that_do_not_identify_a_law_are_flagged(params: list[float], tokens: list[float], words: str) -> None:
    found = fit(grid(params, tokens))
    assert not found.trusted
    assert not any(estimate.stderr == 0 for estimate in found.params.values())
    assert any(words in flag for flag in found.flags), found.flags


def test_collinear_sizes_are_flagged() -> None:
    n = np.geomspace(1e8, 1e10, 12)
    found = fit(FitTable({"params": n, "tokens": 20 * n}, true_loss(n, 20 * n)))
    assert not found.trusted
    assert any("collinear" in flag for flag in found.flags)


def test_a_constant_at_zero_is_flagged() -> None:
    n = np.geomspace(1e7, 1e10, 20)
    loss = 40 * n**-0.12 * np.exp(0.003 * np.random.default_rng(0).standard_normal(20))
    found = fit(FitTable({"params": n}, loss - 0.2), "power-constant")
    assert not found.trusted
    assert any("E lies on its lower bound (0)" in flag for flag in found.flags)
    assert found.params["E"].interval[0] == 0


def test_far_predictions_are_not_trusted() -> None:
    found = fit(grid([1e8, 3e8, 1e9, 3e9, 1e10], [2e9, 1e10, 5e10, 2e11]))
    near, far = found.predict(params=[5e10, 2e11], tokens=[1e12, 1e12])
    assert near.flags == ()
    assert "x20 from what was measured" in far.flags[0]


def test_a_saved_fit_predicts_the_same(tmp_path: Path) -> None:
    found = fit(simulate(Design(16, "huber-log"), np.random.default_rng(1)))
    found.save(tmp_path / "fit.json")
    again = load_fit(tmp_path / "fit.json")
    assert str(again) == str(found)
    assert again.predict(**LARGE)[0].to_dict() == found.predict(**LARGE)[0].to_dict()
    json.loads((tmp_path / "fit.json").read_text())


def test_what_is_no_saved_fit_is_said(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"law": "chinchilla"}')
    with pytest.raises(DataError, match="is no saved fit"):
        load_fit(tmp_path / "other.json")


def test_text_html_and_dict_agree() -> None:
    found = fit(simulate(Design(16, "huber-log"), np.random.default_rng(1)))
    document = found.to_dict()
    assert {"law", "params", "objective", "starts", "success", "trusted", "flags"} <= set(document)
    alpha = f"{document['params']['alpha']['value']:.6g}"
    assert alpha in str(found)
    assert alpha in found._repr_html_()


def test_a_missing_uncertainty_is_nan() -> None:
    """Five parameters, five rows: nothing is left to judge by, and nothing is claimed."""
    n, d = np.array([1e8, 1e9, 1e10, 1e8, 1e10]), np.array([1e9, 3e10, 1e9, 3e11, 3e11])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fit(FitTable({"params": n, "tokens": d}, true_loss(n, d)))
    assert all(math.isnan(estimate.stderr) and math.isnan(estimate.interval[0]) for estimate in found.params.values())
    assert not found.trusted


def test_too_few_rows_are_refused() -> None:
    table = FitTable({"params": np.array([1e8, 1e9]), "tokens": np.array([1e9, 1e10])}, np.array([3.0, 2.5]))
    with pytest.raises(DataError, match="has 5 parameters, and the table 2 usable rows"):
        fit(table)


def test_weights_count_as_repeated_rows() -> None:
    table = simulate(Design(16, "least-squares-log"), np.random.default_rng(2))
    doubled = np.concatenate([np.arange(16), np.arange(4)])
    repeated = fit(table.rows(doubled), loss="least-squares-log")
    weighted = fit(table, loss="least-squares-log", weights=np.array([2.0] * 4 + [1.0] * 12))
    assert weighted.best_values == pytest.approx(repeated.best_values, rel=1e-6)


def test_true_optimum_is_found_by_the_split() -> None:
    n, d = (part.ravel() for part in np.meshgrid(np.geomspace(1e8, 1e10, 6), np.geomspace(2e9, 2e11, 6)))
    found = fit(FitTable({"params": n, "tokens": d}, true_loss(n, d)), loss="least-squares-log")
    assert found.best_values == pytest.approx(TRUTH, rel=1e-5)
    assert found.optimal(1e22).params.value == pytest.approx(true_optimum(1e22), rel=1e-5)
