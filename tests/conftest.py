"""Property tests draw the same examples everywhere and have no deadline: machines differ in speed."""

from hypothesis import settings

settings.register_profile("kvcq", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("kvcq")
