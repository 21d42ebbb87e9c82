"""How accurate fp8 attention is: on a user's own tensors, against published figures, by policy.

`report` answers for given tensors, `published` reproduces the figures of flash-attention PR #2717,
`policies` has the evidence for the default policies. All of them compare with `measure.exact`, and
all but the first yield rows of `results`.
"""

from flash_attn_fp8.accuracy.report import Report, accuracy_report

__all__ = ["Report", "accuracy_report"]
