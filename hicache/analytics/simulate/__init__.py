"""The production cache in simulated time: its core and runtime over pools without bytes, and links that are sums."""
