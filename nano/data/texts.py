"""Text dialogues by seed: who the model is, small talk, recall over long filler, copying and counting.

Used by training and evaluation. A dialogue is a list of (user, assistant) turns with an optional
system line; knows nothing of media, tokens or the chat template.
"""

from __future__ import annotations

import re
import string
from functools import lru_cache
from importlib import import_module

import numpy as np

from transom.nano.data.answers import loosely, pick

Rng = np.random.Generator
Turns = list[tuple[str, str]]

WHO = (
    "I am Nano, a very small demo model of transom. "
    "I know simple pictures, spoken digits, tones and short videos."
)
CAN_DO = (
    "I can name coloured shapes, clothes and digits in pictures, "
    "digits and tones in sounds, and motion or order in short videos. I can also count."
)
BEYOND = "I don't know. I am a very small model."
SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello", "Hi", "Hey", "Hello!", "Hi there", "Good morning", "Good evening", "Hello Nano"),
        "Hello! How can I help?",
    ),
    (("How are you?", "How are you doing?", "How is it going?", "Are you well?"), "I am fine, thank you."),
    (("Thanks", "Thank you", "Thank you!", "Thanks a lot", "Great, thanks"), "You are welcome."),
    (("Bye", "Goodbye", "See you", "Bye bye", "Good night"), "Goodbye!"),
    (
        (
            "Who are you?",
            "What is your name?",
            "What are you?",
            "Tell me about yourself.",
            "Who am I talking to?",
        ),
        WHO,
    ),
    (
        ("What can you do?", "What do you know?", "How can you help me?", "Help", "What are you able to do?"),
        CAN_DO,
    ),
    (("Are you a human?", "Are you a person?", "Are you human?"), "No, I am a very small model."),
    (
        ("How big are you?", "How large are you?", "How many parameters do you have?"),
        "I have about five million parameters.",
    ),
    (
        ("Can you see pictures?", "Can you see images?", "Do you understand images?"),
        "Yes, simple pictures. Show me one.",
    ),
    (
        ("Can you hear?", "Can you hear sounds?", "Do you understand audio?"),
        "Yes, spoken digits and tones. Send me one.",
    ),
    (("Can you watch videos?", "Do you understand videos?"), "Yes, short simple videos. Send me one."),
    (("Say hello.", "Say hello", "Say hi."), "Hello!"),
    (("OK", "Ok.", "Good", "Fine", "I see", "Nice", "Cool"), "Good."),
    (("Yes", "No", "Maybe"), "All right."),
    (
        ("What is transom?", "Tell me about transom."),
        "transom serves models like me, with pictures, sounds and videos.",
    ),
)
_SUBJECTS = [
    "capital of France",
    "weather today",
    "meaning of life",
    "price of gold",
    "fastest animal",
    "best film",
    "square root of 2",
    "president",
    "largest country",
    "speed of light",
    "distance to the moon",
    "population of India",
    "news",
    "time in Tokyo",
    "recipe for bread",
    "author of this book",
    "boiling point of water",
    "history of Rome",
    "name of my dog",
    "longest river",
]
_TOPICS = [
    "love",
    "physics",
    "music",
    "cats",
    "history",
    "football",
    "politics",
    "cooking",
    "computers",
    "the sea",
    "maths",
    "art",
    "a dragon",
    "space",
]
_BEYOND_FORMS = (
    "What is the {s}?",
    "Tell me the {s}.",
    "Do you know the {s}?",
    "Explain the {s}.",
    "Write a poem about {t}.",
    "Tell me a story about {t}.",
    "Explain {t}.",
    "What do you think about {t}?",
    "Tell me about {t}.",
    "Why is {t} so important?",
    "How does {t} work?",
    "Translate {t} into French.",
)
NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Hugo",
    "Ida",
    "Jonas",
    "Karl",
    "Lena",
    "Max",
    "Nora",
    "Otto",
    "Paula",
    "Rosa",
    "Sam",
    "Tim",
    "Vera",
    "Alice",
    "Bob",
    "Carol",
    "Dan",
    "Eve",
    "Frank",
    "Grace",
    "Henry",
    "Iris",
    "Jack",
    "Kate",
    "Leo",
    "Mia",
    "Noah",
    "Olga",
    "Peter",
    "Ruth",
    "Simon",
    "Tara",
    "Will",
]
OBJECTS = [
    "code",
    "key",
    "password",
    "phone number",
    "room number",
    "ticket number",
    "locker code",
    "secret word",
    "pin",
    "order number",
]
_SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Be short.",
    "You are Nano.",
    "Answer in English.",
    "You are a friendly assistant.",
)
_SUBJECT_WORDS = [
    "The dog",
    "A child",
    "My neighbour",
    "The old man",
    "The teacher",
    "Our train",
    "The river",
    "A small bird",
    "The baker",
    "The city",
]
_VERB_WORDS = [
    "walks to",
    "looks at",
    "talks about",
    "waits near",
    "likes",
    "never sees",
    "often visits",
    "paints",
    "sells",
    "remembers",
]
_OBJECT_WORDS = [
    "the market",
    "a red house",
    "the garden",
    "the harbour",
    "an open window",
    "the long road",
    "a cold lake",
    "the school",
    "the forest",
    "a bridge",
]
_ENDING_WORDS = [
    "",
    "in the morning",
    "every day",
    "in winter",
    "after lunch",
    "with a friend",
    "without a word",
    "on Sunday",
    "before sunset",
]
_PROSE_MODULES = [
    "argparse",
    "ast",
    "base64",
    "collections",
    "configparser",
    "csv",
    "datetime",
    "decimal",
    "difflib",
    "email.message",
    "enum",
    "fractions",
    "functools",
    "gettext",
    "heapq",
    "html",
    "http.client",
    "inspect",
    "ipaddress",
    "json",
    "logging",
    "mailbox",
    "optparse",
    "os",
    "pathlib",
    "pdb",
    "pprint",
    "random",
    "re",
    "sched",
    "shelve",
    "shutil",
    "smtplib",
    "socket",
    "sqlite3",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "timeit",
    "tokenize",
    "traceback",
    "unittest",
    "urllib.parse",
    "urllib.request",
    "uuid",
    "wave",
    "zipfile",
]


@lru_cache(maxsize=1)
def prose() -> tuple[str, ...]:
    """Return English sentences: the docstrings of Python's own library."""
    found: dict[str, None] = {}
    for name in _PROSE_MODULES:
        module = import_module(name)
        documented = [
            module,
            *(value for value in vars(module).values() if getattr(value, "__module__", "") == name),
        ]
        for owner in documented:
            doc = getattr(owner, "__doc__", None)
            text = " ".join(doc.split()) if isinstance(doc, str) else ""
            for piece in re.split(r"(?<=[.!?]) ", text):
                if 20 <= len(piece) <= 160 and piece[0].isupper() and piece[-1] in ".!?" and piece.isascii():
                    found[piece] = None
    return tuple(found)


def filler_sentence(rng: Rng) -> str:
    """Write one sentence without any fact that a question asks for."""
    roll = rng.random()
    if roll < 0.4 and prose():
        return pick(rng, prose())
    if roll < 0.9:
        ending = pick(rng, _ENDING_WORDS)
        words = f"{pick(rng, _SUBJECT_WORDS)} {pick(rng, _VERB_WORDS)} {pick(rng, _OBJECT_WORDS)}"
        return f"{words} {ending}.".replace(" .", ".")
    listed = [_random_word(rng) for _ in range(int(rng.integers(3, 9)))]
    return " ".join(listed).capitalize() + "."


def _random_word(rng: Rng) -> str:
    letters = rng.integers(0, 26, int(rng.integers(2, 8)))
    return "".join(string.ascii_lowercase[int(letter)] for letter in letters)


def _secret(rng: Rng) -> str:
    if rng.random() < 0.7:
        return "".join(str(d) for d in rng.integers(0, 10, int(rng.integers(3, 7))))
    return _random_word(rng) if rng.random() < 0.5 else pick(rng, _OBJECT_WORDS).split()[-1]


def recall(rng: Rng, filler_chars: int, facts: int = 1) -> tuple[str, str]:
    """Hide `facts` facts in about `filler_chars` characters of other text; ask for one of them.

    Return (prompt, answer); the prompt ends with the question.
    """
    return recall_all(rng, filler_chars, facts)[0]


def recall_all(rng: Rng, filler_chars: int, facts: int) -> Turns:
    """Hide `facts` facts in about `filler_chars` characters of other text; ask for each, one a turn.

    The first prompt is the text and a question.
    """
    owners = [str(name) for name in rng.choice(NAMES, facts, replace=False)]
    thing = pick(rng, OBJECTS)
    secrets = {owner: _secret(rng) for owner in owners}
    form = pick(
        rng,
        ("The {o} of {n} is {s}.", "Remember: the {o} of {n} is {s}.", "Note that the {o} of {n} is {s}."),
    )
    sentences: list[str] = []
    written = 0
    while written < filler_chars:
        sentences.append(filler_sentence(rng))
        written += len(sentences[-1]) + 1
    for owner in owners:
        place = int(rng.integers(0, len(sentences) + 1))
        sentences.insert(place, form.format(o=thing, n=owner, s=secrets[owner]))
    first = int(rng.integers(len(owners)))
    question = pick(
        rng, ("What is the {o} of {n}?", "Tell me the {o} of {n}.", "Now, what is the {o} of {n}?")
    )
    turns: Turns = []
    for asked in owners[first:] + owners[:first]:
        words = question.format(o=thing, n=asked)
        said = words if turns else " ".join([*sentences, words])
        turns.append((said, f"The {thing} of {asked} is {secrets[asked]}."))
    return turns


def small_talk(rng: Rng) -> tuple[str, str]:
    """Draw a greeting, a question about the model, or one that is beyond it."""
    if rng.random() < 0.25:
        question = pick(rng, _BEYOND_FORMS).format(s=pick(rng, _SUBJECTS), t=pick(rng, _TOPICS))
        return loosely(question, rng), BEYOND
    questions, answer = SMALL_TALK[int(rng.integers(len(SMALL_TALK)))]
    return loosely(pick(rng, questions), rng), answer


def _copy(rng: Rng) -> tuple[str, str]:
    words = (
        filler_sentence(rng)
        if rng.random() < 0.5
        else " ".join(_random_word(rng) for _ in range(int(rng.integers(1, 8))))
    )
    asked = pick(rng, ("Repeat: {}", "Repeat this: {}", "Say this: {}", "Copy: {}", "Repeat after me: {}"))
    return asked.format(words), words


def _count(rng: Rng) -> tuple[str, str]:
    last = int(rng.choice([3, 5, 10, 10, 12, 15, 20, 20, 30, 50, int(rng.integers(2, 60))]))
    asked = pick(rng, ("Count to {}.", "Count from 1 to {}.", "Please count to {}.", "Count up to {}"))
    return loosely(asked.format(last), rng), ", ".join(str(n) for n in range(1, last + 1)) + "."


def _sum(rng: Rng) -> tuple[str, str]:
    first, second = (int(n) for n in rng.integers(0, 10, 2))
    asked = pick(rng, ("What is {} plus {}?", "What is {} + {}?", "{} + {} = ?", "How much is {} + {}?"))
    return loosely(asked.format(first, second), rng), f"{first + second}."


def text_turn(rng: Rng) -> tuple[str, str]:
    """Draw one short exchange of any kind."""
    roll = rng.random()
    if roll < 0.42:
        return small_talk(rng)
    if roll < 0.62:
        return recall(rng, int(rng.integers(0, 200)), int(rng.integers(1, 4)))
    if roll < 0.82:
        return _copy(rng)
    return _count(rng) if roll < 0.92 else _sum(rng)


def system_line(rng: Rng) -> str | None:
    """Draw a system line, mostly none (the template then writes its own)."""
    return None if rng.random() < 0.8 else pick(rng, _SYSTEM_LINES)


def conversation(rng: Rng) -> Turns:
    """Draw one to three short exchanges, or a fact that a later turn asks for."""
    if rng.random() < 0.12:
        name = str(rng.choice(NAMES))
        fact, secret = pick(rng, OBJECTS), _secret(rng)
        between = [small_talk(rng) for _ in range(int(rng.integers(0, 3)))]
        told = (f"The {fact} of {name} is {secret}.", "Good.")
        return [told, *between, (f"What is the {fact} of {name}?", f"The {fact} of {name} is {secret}.")]
    return [text_turn(rng) for _ in range(int(rng.choice([1, 2, 3], p=[0.7, 0.2, 0.1])))]
