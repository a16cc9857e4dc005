"""What hosts need: the byte layout of the cache and what is refused."""
