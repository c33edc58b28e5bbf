"""Every tensor's values in an engine beside the rules', and the documents made from them.

python -m tests.engines collect ENGINE FOLDER   # in the engine's own environment; exit code 1 where anything differs that should not
python -m tests.engines render FOLDER DOCS      # one summary, printed, and a file of tables an engine
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

from tests.engines.render import ENGINES, render
from tests.engines.table import Table


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.engines", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("collect")
    one.add_argument("engine", choices=ENGINES)
    one.add_argument("folder", type=Path)
    all_ = commands.add_parser("render")
    all_.add_argument("folder", type=Path)
    all_.add_argument("docs", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "collect":
        return collect(arguments.engine, arguments.folder)
    print(render(arguments.folder, arguments.docs))
    return 0


def collect(engine: str, folder: Path) -> int:
    """Write FOLDER/ENGINE.json."""
    warnings.simplefilter("ignore")  # engines warn of their own future
    module = importlib.import_module(f"tests.engines.{engine.replace('-', '_')}")
    tables: list[Table] = list(module.tables())
    document = {
        "engine": engine,
        "package": module.PACKAGE,
        "version": version(module.PACKAGE).split("+")[0],
        "tables": [table.to_dict() for table in tables],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{engine}.json").write_text(json.dumps(document, indent=1) + "\n")
    wrong = [line for table in tables for line in table.unexpected()]
    print(f"{engine}: {sum(len(table.rows) for table in tables)} tensors in {len(tables)} runs")
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
