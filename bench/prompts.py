"""The prompts that every benchmark answers: greedy, a fixed number of tokens, no early stop."""

from __future__ import annotations

PROMPTS = {
    "short factual": "What is the capital of France?",
    "reasoning": (
        "A train leaves Chicago at 60 miles per hour. Another leaves New York, 800 miles away, at the same time, "
        "and comes towards it at 80 miles per hour. When do they meet? Let us think step by step."
    ),
    "code completion": (
        'def fibonacci(n):\n    """Return the nth Fibonacci number."""\n    if n <= 1:\n        return n\n'
    ),
    "list": "Five important inventions of the 20th century:\n1.",
    "creative": "Once upon a time, in a kingdom far away, a young prince discovered",
    "technical": "HTTP/2 multiplexing works by",
    "chat": "User: Can you help me understand recursion?\nAssistant:",
    "translation": "Translate 'Hello, how are you?' to French:",
}

TOKENS = 128
"""New tokens of each answer."""
