"""One of the processes of test_train_fsdp: trains the exported program once for each list of its options, one after the other.

    fsdp_ranks.py FOLDER OPTIONS.json

Rank 0's lines of the list number N go to FOLDER/lines-N.jsonl.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path


def main(folder: Path, runs: list[list[str]]) -> None:
    sys.path.insert(0, str(folder))
    program = importlib.import_module("train_fsdp")
    for number, options in enumerate(runs):
        name = f"lines-{number}.jsonl" if os.environ["RANK"] == "0" else f"rank-1-{number}.jsonl"
        with (folder / name).open("w") as file, contextlib.redirect_stdout(file):
            program.main(options)
    program.dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
