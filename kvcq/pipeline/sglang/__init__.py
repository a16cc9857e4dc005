"""Parts of ``kvcq serve --engine sglang``: arguments, this machine, the server as a process, and its proof."""
