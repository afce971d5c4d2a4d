"""Floor 5. Dashboard and chat: draws frozen snapshots, decides nothing."""
