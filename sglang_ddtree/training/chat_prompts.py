"""Training prompts for chat: topics put into templates, passages to work on, MT-bench's train split."""

from __future__ import annotations

import random

from sglang_ddtree.bench.prompts import Prompt, ask, load_prompts
from sglang_ddtree.training.evals_package import nouns, passages

TOPICS = """
photosynthesis; black holes; the French Revolution; inflation; machine learning; climate change; the water cycle;
supply and demand; the Roman Empire; vaccines; quantum computing; the immune system; democracy; jazz music;
renewable energy; plate tectonics; the stock market; evolution; Shakespeare's plays; the Renaissance; nutrition;
time management; public speaking; home gardening; blockchain; cybersecurity; meditation; the solar system; recursion;
sorting algorithms; relational databases; operating systems; neural networks; HTTP and REST; version control;
unit testing; object-oriented programming; probability; calculus; Newton's laws of motion; thermodynamics; genetics;
the periodic table; acids and bases; ocean currents; volcanoes; dinosaurs; ancient Egypt; the Industrial Revolution;
the Cold War; human rights; the United Nations; electric cars; space exploration; artificial intelligence ethics;
social media; remote work; personal finance; job interviews; healthy sleep; yoga; coffee; bread baking; Italian food;
Japan; New Zealand; New York City; Paris; the Amazon rainforest; coral reefs; endangered species; recycling;
urban planning; public transport; the history of the internet; mobile phones; photography; film making; poetry;
modern art; classical music; chess; football; the Olympic Games; marathon training; swimming; mental health; stress;
friendship; leadership; teamwork; creativity; critical thinking; the scientific method; statistics; monopolies;
international trade; unemployment; central banks; taxes; entrepreneurship; marketing; customer service; negotiation;
education systems; language learning; reading habits; parenting; pets; dogs; cats; birds; bees; forests; mountains;
rivers; weather; earthquakes; hurricanes; gravity; light; sound; electricity; magnetism; atoms; chemical bonds; DNA;
proteins; viruses; bacteria; the human brain; the heart; digestion; exercise; philosophy; Socrates; utilitarianism;
stoicism; religion in ancient Greece; mythology; folk tales; science fiction; detective novels; comedy; theatre
"""
WRITING = [
    "Write a short story about {t}.",
    "Write a poem about {t}.",
    "Compose an engaging blog post about {t}.",
    "Write a persuasive email to a friend about {t}.",
    "Draft a professional email to your supervisor about {t}.",
    "Write a descriptive paragraph about {t} that appeals to the senses.",
    "Write a product description for something to do with {t}.",
    "Create a catchy slogan and a short advertisement about {t}.",
    "Write an outline for an essay about {t}.",
    "Write the opening of a novel in which {t} plays a role. Keep it under four sentences.",
    "Write a dialogue between two people who disagree about {t}.",
    "Write a speech about {t} for a school assembly.",
    "Write a headline and a short news article about {t}.",
    "Develop a short lesson plan about {t} for a class of teenagers.",
]
KNOWLEDGE = [
    "Explain {t} to a ten-year-old.",
    "What is {t}? Explain it in simple terms and give an example.",
    "What are the main causes and effects of changes in {t}?",
    "Describe the most important facts about {t} and why they matter.",
    "List five interesting facts about {t}.",
    "What are the advantages and disadvantages of {t}?",
    "Compare {t} and {u}. What do they have in common and how do they differ?",
    "How has {t} changed over the last hundred years?",
    "What is the relationship between {t} and {u}? Explain it with examples.",
    "Give me three tips about {t} for a beginner.",
    "What questions would you ask an expert on {t}?",
    "How would you teach {t} to somebody who has never heard of it? Give a step by step plan.",
    "Summarize what is known about {t} in one paragraph.",
    "What are common misconceptions about {t}?",
    "Why is {t} important? Support your answer with two arguments.",
    "How does {t} work? Explain the process step by step.",
]
ROLES = [
    "Pretend to be a teacher and explain {t} to your class. Start now.",
    "Imagine you are a travel guide. Tell a visitor about {t}.",
    "Act as a journalist and interview somebody about {t}.",
    "Please assume the role of a doctor. A patient asks you about {t}. What do you say?",
    "You are a historian. Describe how people thought about {t} in the past.",
    "Embody the persona of a famous inventor and describe your ideas about {t}.",
    "Picture yourself as a wise old sailor and give advice about {t}.",
    "Now you are a machine learning engineer. Explain {t} to a colleague from sales.",
]
REASONING = [
    "If you had to choose between {t} and {u}, which would you choose and why?",
    "Which word does not belong with the others: {t}, {u}, {v}? Explain your reasoning.",
    "Each problem has three facts. {A} likes {t}. Everyone who likes {t} dislikes {u}. {B} likes {u}. Can {A} and {B} agree? Explain.",
    "David has three sisters, and each of them owns one {t}. How many brothers does each sister have? Explain your thoughts.",
]
PASSAGES = [
    "Summarize the following text in two sentences.\n\n{p}",
    "Extract the names of all people, places and organisations from this text and return them as a list.\n\n{p}",
    "Rewrite the following paragraph in a more casual style.\n\n{p}",
    "What is the main idea of this text? Answer with one sentence and then explain it.\n\n{p}",
    "Write three questions about the following passage and answer them.\n\n{p}",
    "Continue this text with one more paragraph.\n\n{p}",
    "Correct grammatical errors in the following paragraph and return the whole paragraph.\n\n{p}",
    "Turn the facts in this text into a JSON object.\n\n{p}",
]
CODE_CHAT = [
    "Write a Python program that deals with {t}: read a text file line by line and count how often the word occurs.",
    "Write a simple website in HTML about {t} with a button that shows a random fact.",
    "Implement a Python class that represents {t} with two useful methods.",
    "Write a SQL query that finds the ten newest entries about {t}. Explain it.",
]
NAMES = "Ana Bob Cem Dora Eli Fay Gus Hana Ian Jo".split()


def chat_prompts(rng: random.Random, count: int) -> list[Prompt]:
    """``count`` prompts in MT-bench's mix: writing, role play, reasoning, extraction, knowledge, some code."""
    topics = [topic.strip() for topic in TOPICS.replace("\n", " ").split(";")]
    common = nouns()[:1500]
    texts = passages(rng, count // 6)
    prompts = load_prompts("mtbench", "train")
    templates = WRITING * 3 + KNOWLEDGE * 4 + ROLES * 3 + REASONING * 2 + CODE_CHAT * 2
    seen = set()
    while len(prompts) < count - len(texts):
        t, u, v = rng.sample(topics, 3) if rng.random() < 0.4 else rng.sample(common, 3)
        a, b = rng.sample(NAMES, 2)
        text = rng.choice(templates).format(t=t, u=u, v=v, A=a, B=b)
        if text not in seen:
            seen.add(text)
            prompts.append(ask(f"topic/{len(prompts)}", "chat", text))
    prompts += [ask(f"passage/{i}", "chat", rng.choice(PASSAGES).format(p=text)) for i, text in enumerate(texts)]
    return prompts[:count]
