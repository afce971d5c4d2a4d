"""The eight prompts on which exactness is tested and speed is measured: the categories of the reference paper."""

from __future__ import annotations

PROMPTS: dict[str, str] = {
    "factual": "What is the capital of France?",
    "reasoning": (
        "A train leaves Chicago at 60 miles per hour towards New York. At the same time another train leaves New York "
        "at 80 miles per hour towards Chicago. The cities are 790 miles apart. When do the trains meet? "
        "Think step by step."
    ),
    "code": (
        "def fibonacci(n):\n"
        '    """Return the n-th Fibonacci number."""\n'
        "    if n <= 0:\n"
        "        return 0\n"
        "    if n == 1:\n"
        "        return 1\n"
    ),
    "list": "Five important inventions of the 20th century:\n1.",
    "creative": "Once upon a time, in a kingdom far away, a young prince discovered",
    "technical": "HTTP/2 multiplexing works by",
    "chat": "User: Can you help me understand recursion?\nAssistant:",
    "translation": "Translate 'Hello, how are you?' to French:",
}
