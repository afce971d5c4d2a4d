"""Floor 5. OpenAI-compatible HTTP and status."""
