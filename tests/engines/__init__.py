"""`make engines`: every tensor's values in each engine beside the rules', as tables. `python -m tests.engines --help`.

One more engine: a module here, named as the engine, with PACKAGE (what pip calls it) and tables(), which yields a `Table.of(engine, title,
rules, held)` a run; its name in `render.ENGINES` and the Makefile's ENGINE_NAMES, with TESTS_OF_ and INSTALL_ of it. `cases` has the runs
and their rules, `collect.exported` the exported files as a user imports them, and `collect.held_of` reads groups and `init_trace` together.
"""
