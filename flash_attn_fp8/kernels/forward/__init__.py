"""What forward kernels of all architectures share: units of work, operands, scales, barriers."""
