"""Property tests draw the same examples everywhere and have no deadline: machines differ in speed."""

import os

import torch
from hypothesis import settings

settings.register_profile("kvcq", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("kvcq")

if not torch.cuda.is_available():
    # Without a GPU kernels run in Triton's interpreter, which is asked for when Triton is imported: whichever test
    # comes first.
    os.environ["TRITON_INTERPRET"] = "1"
