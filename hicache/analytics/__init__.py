"""Request traces, and the cache driven by them."""
