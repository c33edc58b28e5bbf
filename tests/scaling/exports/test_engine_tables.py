"""What `make engines` makes its tables with: torch's table is equal here, and wrong values, strays and unknown inits are seen."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from sweeps import cli_export
from tests.engines import pytorch
from tests.engines.cases import MUP, exported_rules
from tests.engines.init_trace import InitTrace
from tests.engines.render import BEGIN, END, ENGINES, render
from tests.engines.table import Held, Table


@pytest.fixture(scope="module")
def tables() -> list[Table]:
    return list(pytorch.tables())


def held(table: Table) -> dict[str, Held]:
    """What an engine would hold that has the rules' own values."""
    return {
        row.tensor: Held(
            row.lr.rules,
            row.weight_decay.rules,
            row.eps.rules,
            {"std": None, "constant": row.init.rules, "error": None}
            if row.gain
            else {"std": row.init.rules, "constant": None, "error": None},
        )
        for row in table.rows
    }


def test_every_tensor_of_torchs_optimizer_has_the_rules_values(tables: list[Table]) -> None:
    assert len(tables) == 5
    assert [line for table in tables for line in table.unexpected()] == []
    assert all(table.largest(quantity) == 0 for table in tables for quantity in ("lr", "weight_decay", "eps", "init"))


def test_a_wrong_value_a_stray_tensor_and_a_missing_one_are_seen(tables: list[Table]) -> None:
    rules, values = list(exported_rules(MUP, "multipliers")), held(tables[1])
    assert Table.of("pytorch", "same", rules, values).unexpected() == []
    name = "blocks.1.mlp.up.weight"
    wrong = values | {name: replace(values[name], eps=values[name].eps * (1 + 1e-9))}
    assert Table.of("pytorch", "wrong", rules, wrong).unexpected() == ["pytorch, wrong: eps differs by 1e-09"]
    said = Table.of("pytorch", "said", rules, values, expected={"lr": "a reason"})
    assert said.unexpected() == ["pytorch, said: lr is said to differ and does not"]
    with pytest.raises(ValueError, match="no rule for"):
        Table.of("pytorch", "stray", rules, values | {"a.weight": values[name]})
    with pytest.raises(ValueError, match="has no tensor"):
        Table.of("pytorch", "missing", rules, {key: value for key, value in values.items() if key != name})


def test_a_draws_std_is_followed_through_copies_and_products_and_no_further() -> None:
    with InitTrace() as trace:
        drawn = torch.empty(64, 64).normal_(0.0, 0.5)
        kept = torch.empty(64, 64).copy_(drawn.clone()).mul_(0.25)
        filled = torch.empty(8).fill_(2.0).mul_(3.0)
        shifted = torch.empty(64, 64).normal_(0.0, 0.5).add_(1.0)
    assert (trace.init_of(kept).how, trace.init_of(kept).std) == ("set", 0.125)
    assert trace.init_of(filled).constant == 6.0
    assert trace.init_of(shifted).how == "measured"
    kept.zero_()
    with pytest.raises(ValueError, match="the draw was given"):
        trace.init_of(kept)


def test_the_same_tables_give_the_same_documents_and_a_missing_engine_is_said(tables: list[Table], tmp_path: Path) -> None:
    (tmp_path / "exports.md").write_text(f"head\n{BEGIN}\nold\n{END}\ntail\n")
    with pytest.raises(SystemExit, match="no pytorch"):
        render(tmp_path, tmp_path)
    for engine in ENGINES:
        document = {"engine": engine, "package": "p", "version": "1", "tables": [asdict(table) for table in tables]}
        (tmp_path / f"{engine}.json").write_text(json.dumps(document))
    first = render(tmp_path, tmp_path)
    pages = {path.name: path.read_text() for path in tmp_path.glob("**/*.md")}
    assert len(pages) == len(ENGINES) + 1
    assert render(tmp_path, tmp_path) == first
    assert {path.name: path.read_text() for path in tmp_path.glob("**/*.md")} == pages
    assert pages["exports.md"] == f"head\n{BEGIN}\n{first}\n{END}\ntail\n"


def test_every_engine_that_is_exported_to_is_installed_tested_and_has_its_tables_in_the_docs() -> None:
    root = Path(__file__).parents[3]
    makefile, exports = (root / "Makefile").read_text(), (root / "docs" / "exports.md").read_text()
    names = re.search(r"^ENGINE_NAMES := (.*)$", makefile, re.M)
    assert names is not None
    assert tuple(names[1].split()) == ENGINES == cli_export.ENGINES
    for engine in ENGINES:
        assert re.search(rf"^TESTS_OF_{engine} := ", makefile, re.M), engine
        assert engine == "pytorch" or re.search(rf"^INSTALL_{engine} = ", makefile, re.M), engine
        assert (root / "docs" / "engines" / f"{engine}.md").exists()
        assert f"| [{engine}](engines/{engine}.md)" in exports


def test_make_engines_installs_the_versions_that_the_exports_name() -> None:
    makefile = (Path(__file__).parents[3] / "Makefile").read_text()
    for engine, command in cli_export.INSTALL.items():
        for pinned in re.findall(r"\S+==\S+", command):
            assert re.search(rf"^INSTALL_{engine} = .*{re.escape(pinned)}", makefile, re.M), (engine, pinned)
