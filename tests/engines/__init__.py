"""`make engines`: every tensor's values in each engine beside the rules', as tables. `python -m tests.engines --help`."""
