"""Parts of ``kvcq bench serve``: cells, servers of each arm, the client, traces, and what is made of them."""
