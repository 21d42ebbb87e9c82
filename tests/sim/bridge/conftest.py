"""Skips without CuTe DSL."""

import importlib.util

if importlib.util.find_spec("cutlass") is None:
    collect_ignore_glob = ["test_*.py"]
