"""``python -m kvcq``, the same as ``kvcq``."""

from kvcq.cli.main import run

if __name__ == "__main__":
    run()
