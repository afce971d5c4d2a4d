"""Floor 2. Runs a shard: paged, timed; sampling."""
