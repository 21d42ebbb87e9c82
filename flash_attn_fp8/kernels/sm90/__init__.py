"""The SM90 forward kernel: docs/kernel_sm90.md."""
