"""Exports: a run's rules in the words of the engine that will train it. Torch-free but for `recipes`, which are shipped, not imported.

`plan` has what every engine needs, `folded` the form without multipliers, and each engine has a module of its own. `ENGINES` names them.
"""
