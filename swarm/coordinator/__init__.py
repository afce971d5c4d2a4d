"""Floor 4. Sessions and scheduling: whoever takes a prompt runs this."""
