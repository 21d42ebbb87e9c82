"""The published accuracy table: python -m benchmarks.accuracy; half an hour on two cores.

The same as `flash-attn-fp8 accuracy --full --no-policies --out benchmarks/results`, which writes
accuracy.{json,md,png} there.
"""

from benchmarks import RESULTS
from flash_attn_fp8.cli import app

if __name__ == "__main__":
    app(["accuracy", "--full", "--no-policies", "--out", str(RESULTS)])
