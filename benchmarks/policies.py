"""Evidence for the default policies: python -m benchmarks.policies [--quick]; minutes in full.

Writes benchmarks/results/policies.{json,md,png}.
"""

import sys
import time

from benchmarks import RESULTS, ROOT
from flash_attn_fp8.accuracy.experiments import policies
from flash_attn_fp8.results import Results


def main() -> None:
    """Measure, save, and say where."""
    experiment = policies(quick="--quick" in sys.argv[1:])
    begun, rows = time.monotonic(), []
    for step, found in enumerate(experiment.rows(), 1):
        rows += found
        print(f"\r{step} of {len(experiment)}", end="", file=sys.stderr, flush=True)
    command = " ".join(["python -m benchmarks.policies", *sys.argv[1:]])
    written, why_no_picture = experiment.save(Results.here(rows, command, ROOT), RESULTS)
    print(file=sys.stderr)
    print(f"{time.monotonic() - begun:.0f} s:", *written, sep="\n")
    if why_no_picture:
        print(why_no_picture)


if __name__ == "__main__":
    main()
