"""Training prompts that ask for maths: word problems from templates, GSM8K's train split with new numbers, evals."""

from __future__ import annotations

import random
import re

from sglang_ddtree.bench.prompts import Prompt, ask, load_prompts
from sglang_ddtree.training.evals_package import user_questions

NAMES = (
    "Maya Tom Priya Carlos Aisha Ben Chloe Diego Elena Farid Grace Hugo Ines Jamal Kira Leo Mina Noah Olga Pedro "
    "Quinn Rosa Sam Tara Umar Vera Will Yara Zoe Anna Brian Claire David Emma Frank Hannah Ivan Julia Kevin Laura"
).split()
ITEMS = (
    "apples books pencils marbles stickers cookies tickets shells coins cards flowers eggs balloons bottles candles "
    "oranges muffins toys stamps photos bracelets carrots magazines pens beads mangoes cupcakes buttons"
).split()
PLACES = "school,the market,a farm,the bakery,the library,a festival,the office,a camp,the museum,her garden".split(",")
EVALS_FILES = (
    "multistep-word-problems/samples",
    "math_for_5th-grader/samples",
    "probabilities-word-problems/samples",
    "tricky-word-problems/samples",
    "probability_questions/probability_questions",
    "arithmetical_puzzles/arithmetical_puzzles",
    "finance_calc/samples",
    "jee-math/samples",
    "euler_problems/euler_problems",
    "logical_counting/samples",
    "math_equations/math_equations",
    "logic_and_probability/logic_and_probability",
)
TEMPLATES = """
{A} has {a} {x}. {B} gives {A} {b} more, and then {A} loses {c}. How many {x} does {A} have now?
{A} buys {a} packs of {x} with {b} in each pack. {A} gives {c} {x} to {B}. How many {x} are left?
A box holds {a} {x}. {A} fills {b} boxes and has {c} {x} left over. How many {x} did {A} have in total?
{A} earns ${a} an hour and works {b} hours a week. How much does {A} earn in {c} weeks?
A train travels {a} miles an hour for {b} hours, then {c} miles an hour for {d} hours. How far does it travel in total?
{A} reads {a} pages on Monday, twice as many on Tuesday, and {b} fewer than on Tuesday on Wednesday. How many pages does {A} read in all?
A shop sells {x} for ${a} each. On Saturday it sold {b} {x} and on Sunday {c} more than on Saturday. How much money did it make on the weekend?
{A} is {a} years old. {B} is {b} years older than {A}, and {C} is half as old as {B}. What is the sum of their ages?
There are {a} students in a class. {p}% of them play football and the rest play basketball. How many students play basketball?
{A} and {B} share {a} {x} in the ratio 2:3. How many {x} does {B} get?
A recipe needs {a} cups of flour for {b} cookies. How many cups of flour does {A} need for {c} cookies?
{A} saves ${a} every week. A bicycle costs ${d00}. {A} already has ${b}. How many weeks does it take until {A} can buy it?
A rectangle is {a} cm long and {b} cm wide. What are its perimeter and its area?
{A} runs {a} kilometers every day from Monday to Friday and {b} kilometers on Saturday. How many kilometers does {A} run in {c} weeks?
The price of a jacket is ${d00}. It is reduced by {p}%, and {A} has a coupon for another ${a}. How much does {A} pay?
{A} has three times as many {x} as {B}. Together they have {m4} {x}. How many {x} does {B} have?
A farmer has {a} cows, {b} chickens and {c} goats. How many legs do the animals have altogether?
{A} planted {a} rows of {b} tomato plants. Each plant gives {c} tomatoes. {A} sells {p}% of them. How many tomatoes does {A} sell?
It takes {a} workers {b} days to build a wall. How many days would {c} workers need?
{A} drinks {a} glasses of water a day. A glass holds {b}00 milliliters. How many liters does {A} drink in {c} days?
A bus starts with {b0} passengers. At the first stop {a} get off and {b} get on. At the second stop {c} get off. How many passengers are on the bus now?
{A} bought {a} {x} at ${b} each and {c} {y} at ${d} each. {A} paid with a ${d00} bill. How much change does {A} get?
A tank holds {d00} liters. A pump fills it with {a} liters a minute while {b} liters a minute leak out. How long does it take to fill the tank?
{A} scored {a}, {b} and {c} points in three games. How many points does {A} need in the fourth game for an average of {d}?
{A} has {a} quarters, {b} dimes and {c} nickels. How much money does {A} have in dollars?
In a parking lot there are {a} cars and {b} motorcycles. How many wheels are there in total?
{A} cuts a rope of {m4} meters into 4 equal pieces and uses {a} meters of each. How many meters of rope are left in total?
A phone plan costs ${a} a month plus ${b} for every gigabyte. {A} used {c} gigabytes in March and {d} in April. What did {A} pay for the two months?
{A} wants to read a book of {d00} pages in {a} days. How many pages a day does {A} have to read, and what if {A} starts {b} days late?
{A} bakes {a} trays of {b} cupcakes. {B} eats {c} of them and the rest is put into boxes of 6. How many boxes are needed?
At {place}, {A} sold {a} {x} in the morning and {b} times as many in the afternoon. How many {x} did {A} sell that day?
{A} walks to {place} in {a} minutes and back in {b} minutes, {c} days a week. How many hours does {A} walk in {d} weeks?
{A} invests ${d00} at {a}% interest a year. How much is it worth after {b} years of simple interest?
The sum of two numbers is {m4} and their difference is {a}. What are the numbers?
Solve for x: {a}x + {b} = {c0}. Show your steps.
What is {p}% of {d00}? Explain how you got the answer.
Simplify the expression {a}(x + {b}) - {c}(x - {d}).
{A} has {d00} {x} and gives 1/4 of them to {B} and 1/5 of the rest to {C}. How many {x} does {A} keep?
A garden has {a} rose bushes. Each has {b} roses and each rose has {c} thorns. How many thorns are there in total?
{A} makes {a} bracelets a day and sells each for ${b}. The beads for one bracelet cost ${d}. What is the profit after {c} days?
{A} is twice as old as {B}. In {a} years the sum of their ages will be {m4}. How old is {B} now?
A school orders {a} buses for {c00} students. Each bus has {b0} seats. How many students do not get a seat?
How many minutes are there in {a} hours and {b} minutes? And how many seconds?
{A} typed {a}0 words in {b} minutes. At this rate, how many words does {A} type in an hour?
A pizza is cut into {a} slices. {A}, {B} and {C} order {b} pizzas and eat {c} slices each. How many slices are left?
{A} spends {p}% of a salary of ${c00}0 on rent and ${a}00 on food. How much money is left?
Find the least common multiple and the greatest common divisor of {a} and {b0}.
A circle has a radius of {a} cm. What are its area and its circumference?
{A} collected {a} {x}, {B} collected {b} more than {A}, and {C} collected twice as many as {B}. How many {x} did they collect together?
A movie ticket costs ${a} for adults and ${b} for children. A family of 2 adults and {c} children also buys popcorn for ${d}. How much do they spend?
""".strip().splitlines()


def maths_prompts(rng: random.Random, count: int) -> list[Prompt]:
    """``count`` prompts: GSM8K's train split and variations of it, the evals package, and templates for the rest."""
    prompts = gsm8k_variations(rng, copies=14) + user_questions(EVALS_FILES, "maths", rng, per_file=60)
    templated = (templated_problem(rng, i) for i in range(10**6))
    seen = set()
    while len(prompts) < count:
        prompt = next(templated)
        text = prompt.messages[0]["content"]
        if text not in seen:
            seen.add(text)
            prompts.append(prompt)
    return prompts[:count] if len(prompts) > count else prompts


def templated_problem(rng: random.Random, number: int) -> Prompt:
    """One word problem: a template with names, things and numbers drawn."""
    template = TEMPLATES[number % len(TEMPLATES)]
    a, b, c, d = (rng.randint(2, 30) for _ in range(4))
    names = rng.sample(NAMES, 3)
    things = rng.sample(ITEMS, 2)
    text = template.format(
        A=names[0], B=names[1], C=names[2], x=things[0], y=things[1], place=rng.choice(PLACES),
        a=a, b=b, c=c, d=d, p=5 * rng.randint(1, 19), m4=4 * rng.randint(5, 40),
        b0=10 * b, c0=b + 7 * a, c00=100 * rng.randint(2, 9), d00=100 * rng.randint(2, 9) + 20 * rng.randint(0, 4),
    )  # fmt: skip
    return ask(f"template/{number}", "maths", text)


def gsm8k_variations(rng: random.Random, copies: int) -> list[Prompt]:
    """Every train question as it is, and ``copies`` times with other names and numbers."""
    prompts = []
    for prompt in load_prompts("gsm8k", "train"):
        text = prompt.messages[0]["content"]
        prompts.append(prompt)
        names = sorted({word for word in re.findall(r"\b[A-Z][a-z]{2,}\b", text) if text.count(word) > 1})
        names = [
            name for name in names if name not in ("How", "The", "She", "Her", "His", "They", "There", "What", "Each")
        ]
        for copy in range(copies):
            changed = re.sub(
                r"(?<![\d.,])\d{1,4}(?![\d,]*\d|\.\d)", lambda found: str(nearby(int(found.group()), rng)), text
            )
            for name, other in zip(names, rng.sample(NAMES, len(names))):
                changed = re.sub(rf"\b{name}\b", other, changed)
            prompts.append(ask(f"{prompt.id}/copy{copy}", "maths", changed))
    return prompts


def nearby(number: int, rng: random.Random) -> int:
    """Another number of about the same size."""
    return max(1, round(number * rng.uniform(0.5, 1.9)) + rng.choice([0, 0, 1, 2]))
