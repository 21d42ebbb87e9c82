"""Benchmarks, run as modules from the root of a checkout; their results lie in `results/`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
