"""Decode kernels in CUDA C++, compiled at run time by NVRTC; nothing here is imported where `cuda.core` is missing."""
