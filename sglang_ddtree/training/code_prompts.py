"""Training prompts that ask for code: standard-library docstrings, made-up HumanEval-like tasks, HumanEval's train split."""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path

from sglang_ddtree.bench.prompts import Prompt, ask, code_question, load_prompts

MAX_DOCSTRING = 500


def code_prompts(rng: random.Random, count: int) -> list[Prompt]:
    """``count`` prompts: all that come from HumanEval's train split, the rest half made up, half from docstrings."""
    benchmark = humaneval_variations()
    made_up = synthetic_functions(rng)
    documented = documented_functions(rng)
    rest = max(0, count - len(benchmark))
    return benchmark + made_up[: rest // 2] + documented[: rest - rest // 2]


def humaneval_variations() -> list[Prompt]:
    """Every train problem as it is asked in the benchmark and in four other ways."""
    prompts = []
    for prompt in load_prompts("humaneval", "train"):
        function = prompt.messages[0]["content"].split("```python\n")[1].removesuffix("\n```")
        ways = (
            code_question(function),
            f"{function}\n\nFinish this function.",
            f"Write unit tests for this Python function.\n\n```python\n{function}\n```",
            f"Explain step by step how to implement this function, then show the code.\n\n{function}",
            f"Implement this in Python and explain your solution.\n\n```python\n{function}\n```",
        )
        prompts += [ask(f"{prompt.id}/way{i}", "code", text) for i, text in enumerate(ways)]
    return prompts


def documented_functions(rng: random.Random) -> list[Prompt]:
    """Functions of the standard library that have a docstring, read without importing anything."""
    prompts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
                continue
            doc = (ast.get_docstring(node) or "").strip()
            if 30 <= len(doc) <= MAX_DOCSTRING:
                arguments = ast.unparse(node.args)
                prompts.append((f"stdlib/{path.stem}.{node.name}", node.name, arguments, doc))
    unique = list({(name, doc): (id, name, arguments, doc) for id, name, arguments, doc in prompts}.values())
    rng.shuffle(unique)
    return [ask(id, "code", documented_question(name, arguments, doc, rng)) for id, name, arguments, doc in unique]


def documented_question(name: str, arguments: str, doc: str, rng: random.Random) -> str:
    """One of several questions about a function, mostly to complete it."""
    indented = doc.replace("\n", "\n    ")
    function = f'def {name}({arguments}):\n    """{indented}\n    """'
    first = doc.split("\n\n")[0].replace("\n", " ")
    plain = arguments.replace("self, ", "").replace("self", "")
    return rng.choice(
        [code_question(function)] * 6
        + [
            f"Write a Python function `{name}({plain})` that does this: {first}",
            f"Write a Python function for the following task and add a short example of its use. {first}",
            f"Explain what this Python function does and when one would use it.\n\n```python\n{function}\n```",
            f"Write unit tests for this function.\n\n```python\n{function}\n```",
        ]
    )


# (words of the docstring, part of the function's name, predicate)
FILTERS: list[tuple[str, str, Callable | None]] = [
    ("even numbers", "even", lambda x: x % 2 == 0),
    ("odd numbers", "odd", lambda x: x % 2 == 1),
    ("positive numbers", "positive", lambda x: x > 0),
    ("negative numbers", "negative", lambda x: x < 0),
    ("numbers divisible by three", "multiples_of_three", lambda x: x % 3 == 0),
    ("prime numbers", "prime", lambda x: x > 1 and all(x % d for d in range(2, x))),
    ("perfect squares", "squares", lambda x: x >= 0 and int(x**0.5) ** 2 == x),
    ("numbers greater than ten", "large", lambda x: x > 10),
    ("numbers at even positions", "even_positions", None),
    ("numbers with two digits", "two_digit", lambda x: 10 <= abs(x) <= 99),
    ("numbers that end in five", "ending_in_five", lambda x: abs(x) % 10 == 5),
    ("numbers smaller than the average of the list", "below_average", None),
]
MAPS: list[tuple[str, str, Callable]] = [
    ("", "", lambda x: x),
    ("the squares of the ", "squared_", lambda x: x * x),
    ("the doubled values of the ", "doubled_", lambda x: 2 * x),
    ("the absolute values of the ", "absolute_", abs),
    ("the digit sums of the ", "digit_sum_", lambda x: sum(int(d) for d in str(abs(x)))),
    ("the cubes of the ", "cubed_", lambda x: x**3),
]
REDUCTIONS: list[tuple[str, str, str, Callable]] = [
    ("Return the sum of {what} in the list.", "sum_{name}", "int", sum),
    (
        "Return the largest of {what} in the list, or None if there are none.",
        "max_{name}",
        "int",
        lambda v: max(v, default=None),
    ),
    (
        "Return the smallest of {what} in the list, or None if there are none.",
        "min_{name}",
        "int",
        lambda v: min(v, default=None),
    ),
    ("Count {what} in the given list without duplicates.", "count_unique_{name}", "int", lambda v: len(set(v))),
    ("Given a list of integers, return a sorted list of {what}.", "sorted_{name}", "List[int]", sorted),
    ("Return {what} in reverse order.", "reversed_{name}", "List[int]", lambda v: v[::-1]),
    (
        "Compute the running total of {what} in the list.",
        "running_{name}",
        "List[int]",
        lambda v: [sum(v[: i + 1]) for i in range(len(v))],
    ),
    (
        "Return the product of {what}, or 1 if there are none.",
        "product_{name}",
        "int",
        lambda v: __import__("math").prod(v),
    ),
]
# (name, words of the docstring, function)
STRINGS: list[tuple[str, str, Callable]] = [
    ("count_vowels", "Return the number of vowels in {s}.", lambda s: sum(c in "aeiou" for c in s.lower())),
    ("reverse_words", "Return {s} with its words in reverse order.", lambda s: " ".join(s.split()[::-1])),
    (
        "longest_word",
        "Return the longest word of {s}. The first one wins if there are several.",
        lambda s: max(s.split(), key=len),
    ),
    ("remove_vowels", "Remove all vowels from {s}.", lambda s: "".join(c for c in s if c.lower() not in "aeiou")),
    (
        "is_palindrome",
        "Check whether {s} reads the same in both directions, ignoring spaces and case.",
        lambda s: (t := s.lower().replace(" ", "")) == t[::-1],
    ),
    ("capitalize_words", "Capitalise the first letter of every word of {s}.", lambda s: s.title()),
    (
        "letter_frequencies",
        "Return a dictionary that maps every letter of {s} to how often it occurs.",
        lambda s: {c: s.count(c) for c in s if c != " "},
    ),
    (
        "first_letters",
        "Return the first letters of all words of {s} as one string.",
        lambda s: "".join(w[0] for w in s.split()),
    ),
    (
        "swap_case",
        "Turn the lower case letters of {s} into upper case and the other way round.",
        lambda s: s.swapcase(),
    ),
    (
        "words_of_length",
        "Return the list of words of {s} that have exactly five letters.",
        lambda s: [w for w in s.split() if len(w) == 5],
    ),
    (
        "unique_letters",
        "Return the number of distinct letters in {s}, ignoring case.",
        lambda s: len(set(s.lower().replace(" ", ""))),
    ),
    ("every_second", "Return every second character of {s}, beginning with the first.", lambda s: s[::2]),
    (
        "sort_words",
        "Return the words of {s} in alphabetical order, separated by one space.",
        lambda s: " ".join(sorted(s.split())),
    ),
    (
        "count_upper",
        "Count the upper case letters of {s} that stand at an even index.",
        lambda s: sum(c.isupper() for c in s[::2]),
    ),
    ("replace_spaces", "Replace every space of {s} by an underscore.", lambda s: s.replace(" ", "_")),
    (
        "caesar_shift",
        "Shift each letter of {s} by one place in the alphabet, z becomes a.",
        lambda s: "".join(chr((ord(c) - 97 + 1) % 26 + 97) if c.islower() else c for c in s),
    ),
]
TEXTS = [
    "hello world",
    "The quick brown Fox",
    "never odd or even",
    "a Day in the life",
    "green apple tree",
    "Python is fun",
    "level up",
    "data science class",
]
STRING_WORDS = ["the given string", "a string", "the input text", "a sentence", "the string s"]


def synthetic_functions(rng: random.Random) -> list[Prompt]:
    """Function stubs in HumanEval's style whose doctest examples were computed, not written by hand."""
    tasks = []
    for noun, name, keep in FILTERS:
        for words, prefix, change in MAPS:
            for sentence, pattern, kind, reduce in REDUCTIONS:
                what = f"{words}{noun}" if words else f"the {noun}"
                lists = [[rng.randint(-12, 60) for _ in range(rng.randint(4, 7))] for _ in range(2)]
                examples = []
                full = pattern.format(name=prefix + name)
                for values in lists:
                    average = sum(values) / len(values)
                    kept = [
                        x
                        for i, x in enumerate(values)
                        if (keep(x) if keep else (i % 2 == 0 if "position" in noun else x < average))
                    ]
                    examples.append(f"    >>> {full}({values})\n    {reduce([change(x) for x in kept])!r}\n")
                argument = rng.choice(["numbers", "lst", "values", "l", "arr"])
                head = rng.choice(["from typing import List\n\n\n", ""])
                annotation = f"{argument}: List[int]" if head else argument
                result = f" -> {kind}" if head else ""
                doc = sentence.format(what=what)
                tasks.append(
                    (full, f'{head}def {full}({annotation}){result}:\n    """{doc}\n{"".join(examples)}    """')
                )
    for name, sentence, function in STRINGS:
        for words in STRING_WORDS:
            texts = rng.sample(TEXTS, 2)
            shown = "".join(f"    >>> {name}({text!r})\n    {function(text)!r}\n" for text in texts)
            doc = sentence.format(s=words)
            hint = rng.choice([": str", ""])
            tasks.append((f"{name}/{words}", f'def {name}(text{hint}):\n    """ {doc}\n{shown}    """'))
    rng.shuffle(tasks)
    ways = [code_question] * 4 + [
        lambda f: f"{f}\n\nFinish this function.",
        lambda f: f"Implement this in Python and explain your solution.\n\n```python\n{f}\n```",
    ]
    return [ask(f"synthetic/{name}", "code", rng.choice(ways)(text)) for name, text in tasks]
