"""GPU kernels of the served cache: write rows, attend for one token, attend for a chunk.

One operation a file: kernel, launcher, launch table. `reference` holds what each must compute, in torch.
"""
