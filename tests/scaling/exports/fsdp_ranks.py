"""One of the processes of test_train_fsdp: trains the exported program once for each list of its options, one after the other.

    fsdp_ranks.py FOLDER OPTIONS.json

A list is [folder of plan.json and run.json, option, ...]. Rank 0's lines of the list number N go to FOLDER/lines-N.jsonl, what it says
on stderr or ends with to FOLDER/said-N.txt.
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
    rank = "" if os.environ["RANK"] == "0" else "rank-1-"
    for number, (exported, *options) in enumerate(runs):
        program.HERE = Path(exported)
        lines, said = folder / f"{rank}lines-{number}.jsonl", folder / f"{rank}said-{number}.txt"
        with lines.open("w") as out, said.open("w") as err, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                program.main(options)
            except SystemExit as end:
                print(end.code, file=err)
    program.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
