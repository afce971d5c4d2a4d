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

_CODE = """\
def total(prices, tax):
    result = 0
    for price in prices:
        result = result + price
    return result + result * tax


def average(prices):
    if len(prices) == 0:
        return 0
    return total(prices, 0) / len(prices)


def cheapest(prices):
    result = prices[0]
    for price in prices:
        if price < result:
            result = price
    return result
"""

_TEXT = """\
The bridge was opened on 3 May 1932 by the mayor, Helen Strand. It is 412 metres long and carries two lanes of traffic.
The engineer was Otto Brandt, who had built the railway station in 1921. During the flood of 1954 two of its seven piers
were damaged; they were rebuilt in 1956 under the direction of Ingrid Falk. Since 1988 it has been a protected monument.
In 2009 the lighting was replaced, and in 2017 a path for bicycles was added on the northern side.
"""

REPEATING = {
    "edit": f"Rename `price` to `item` and `prices` to `items` in this code. Give the whole code.\n\n{_CODE}",
    "extract": f"Give every sentence of this text that holds a year, word for word, as a list.\n\n{_TEXT}",
    "changes": f"Repeat this text word for word, but write every year as two digits.\n\n{_TEXT}",
}
"""Prompts whose answers repeat them."""
