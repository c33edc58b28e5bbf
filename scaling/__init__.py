"""One run: what is trained, under which rules, and what it leaves behind.

Importing this package, its configs, rules, accounting or records never imports torch.
"""

__version__ = "0.1.0"
