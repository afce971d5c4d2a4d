"""Floor 0. Ids, messages, codec, limits, errors, configuration: plain data, no asyncio, no I/O."""
