"""Floor 1. Sources, IR, layer map, shard, layer store, tokenizer."""
