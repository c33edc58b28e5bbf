"""JSON of all engines -> one summary, and a Markdown file of tables for each. The same JSON gives the same files. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engines.table import QUANTITIES, Cell, Row, Table

ENGINES = ("pytorch", "deepspeed", "hf", "torchtitan", "megatron", "olmo-core")
HEADS = {"lr": "LR", "weight_decay": "weight decay", "eps": "eps", "init": "init std"}
MADE_BY = "Made by `make engines`; not to be edited."
BEGIN, END = "<!-- summary of make engines -->", "<!-- end of the summary -->"


def render(folder: Path, docs: Path) -> str:
    """Write DOCS/engines/ENGINE.md for every engine, put the summary between its marks in DOCS/exports.md, and return it.

    Raises SystemExit where an engine's JSON is missing.
    """
    missing = [engine for engine in ENGINES if not (folder / f"{engine}.json").exists()]
    if missing:
        raise SystemExit(f"no {', '.join(missing)}: python -m tests.engines collect ENGINE {folder}")
    documents = [json.loads((folder / f"{engine}.json").read_text()) for engine in ENGINES]
    (docs / "engines").mkdir(exist_ok=True)
    for document in documents:
        (docs / "engines" / f"{document['engine']}.md").write_text(page(document))
    text = summary(documents)
    exports = docs / "exports.md"
    head, mark, rest = exports.read_text().partition(BEGIN + "\n")
    _, end, tail = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{exports} has no lines {BEGIN!r} and {END!r}")
    exports.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")
    return text


def tables_of(document: dict[str, Any]) -> list[Table]:
    return [Table.from_dict(values) for values in document["tables"]]


def summary(documents: list[dict[str, Any]]) -> str:
    """Engine, version, tensors compared, and the largest relative difference of each quantity."""
    lines = [
        "| engine | version | runs | tensors compared | " + " | ".join(HEADS.values()) + " |",
        "|---|---|---|---|" + "---|" * len(HEADS),
    ]
    for document in documents:
        tables = tables_of(document)
        same, other = [table for table in tables if not table.expected], [table for table in tables if table.expected]
        lines += [_summary_line(document, "", same)] if same else []
        lines += [_summary_line(document, ", differences stated", other)] if other else []
    return "\n".join(lines)


def _summary_line(document: dict[str, Any], words: str, tables: list[Table]) -> str:
    name, count = document["engine"], sum(len(table.rows) for table in tables)
    cells = [f"[{name}](engines/{name}.md){words}", f"{document['package']} {document['version']}", str(len(tables)), str(count)]
    return "| " + " | ".join(cells + [_worst(tables, quantity) for quantity in QUANTITIES]) + " |"


def _worst(tables: list[Table], quantity: str) -> str:
    words = difference(max(table.largest(quantity) for table in tables))
    measured = [value for table in tables if (value := table.largest_measured(quantity)) is not None]
    return words + (f"; measured ones within {max(measured):.1f} standard errors" if measured else "")


def difference(value: float) -> str:
    """A relative difference in two digits; "0" is equality of double-precision numbers."""
    return "0" if value == 0 else f"{value:.1e}" if abs(value) < 0.01 else f"{value:.2g}"


def page(document: dict[str, Any]) -> str:
    """One engine's tables."""
    parts = [f"# Every tensor in {document['engine']} ({document['package']} {document['version']})", MADE_BY, LEGEND]
    for table in tables_of(document):
        parts.append(f"## {table.title}")
        parts += table.notes
        parts += [f"* {HEADS[quantity]} differs: {reason}" for quantity, reason in table.expected.items()]
        parts.append("\n".join(_markdown(table)))
    return "\n\n".join(parts) + "\n"


LEGEND = """\
Values by the rules (`mutransfer explain`, in the form that was exported), in the engine, and (engine - rules) / rules. Numbers are printed
in six digits and compared in full: 0 is equality of double-precision numbers. `x` is the multiplier that the folded form moved into the
tensor. LR is the peak. Init: the std that the engine's init code hands to its normal draw, or for a gain the value that it starts at (=);
a std marked ~ was measured on the entries of a draw, and stands with its standard error."""


def _markdown(table: Table) -> list[str]:
    heads = [f"{head}: rules | engine | difference" for head in HEADS.values()]
    lines = ["| tensor | rule of | x | " + " | ".join(heads) + " |", "|---" * (3 + 3 * len(heads)) + "|"]
    for row in table.rows:
        cells = [_cell(row, quantity) for quantity in QUANTITIES]
        lines.append(f"| {row.tensor} | {row.ours} | {row.multiplier:.6g} | " + " | ".join(cells) + " |")
    return lines


def _cell(row: Row, quantity: str) -> str:
    cell: Cell = getattr(row, quantity)
    sign = "= " if quantity == "init" and row.gain else "~ " if cell.error is not None else ""
    error = "" if cell.error is None else f" (± {cell.error:.1e})"
    return f"{sign}{cell.rules:.6g} | {sign}{cell.engine:.6g} | {difference(cell.difference)}{error}"
