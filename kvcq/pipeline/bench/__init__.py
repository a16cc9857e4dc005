"""Time the kernels on this machine: what is measured, how, and the table of it."""
