"""Plain made-up sentences of everyday words, as filler between facts; and the words themselves."""

from __future__ import annotations

import random

NOUNS = """
apple river garden stone window bridge forest candle mirror ladder anchor silver house road tree bird table letter
door light engine valve fan boat hill mill shop bread book rain map sky water path field horse dog cat fish cup
chair lamp clock train ship street market school church tower wall gate farm cloud storm wind snow summer winter
morning evening friend child mother father teacher doctor baker farmer sailor king queen song story paper pen box
key coat hat shoe ring coin bag basket bottle knife spoon plate kitchen room floor roof corner island valley
mountain lake beach wood leaf flower grass seed fruit orange lemon potato cheese milk butter sugar salt tea coffee
honey soup cake
""".split()
ADJECTIVES = """
small old green quiet large new red blue white black dark warm cold long short high low soft heavy light empty full
clean dry wet young tired happy kind brave strange simple wide narrow early late slow quick bright
""".split()
VERBS = """
walked looked found kept opened closed saw heard carried painted bought sold left followed watched washed built
moved touched liked wanted needed remembered forgot cleaned lost visited
""".split()
PLACES = """
under over behind near beside above below across inside outside along past
""".split()
TIMES = """in the morning|in the evening|after a while|every summer|before noon|at night|on the next day|once again|in
winter|as always""".replace("\n", " ").split("|")
PEOPLE = "she he they we the man the woman the boy the girl".replace("the ", "the_").split()
LEXICON = tuple(dict.fromkeys(NOUNS + ADJECTIVES + VERBS + PLACES))


def sentence(draw: random.Random) -> str:
    """Return one sentence; now and then a mere row of words."""
    one, two = draw.choice(NOUNS), draw.choice(NOUNS)
    adjective, verb, place, time = (draw.choice(words) for words in (ADJECTIVES, VERBS, PLACES, TIMES))
    who = draw.choice(PEOPLE).replace("_", " ")
    form = draw.randrange(8)
    if form == 0:
        text = f"the {adjective} {one} {verb} the {two} {time}"
    elif form == 1:
        text = f"{who} {verb} a {adjective} {one} {place} the {two}"
    elif form == 2:
        text = f"{time} {who} {verb} the {one}"
    elif form == 3:
        text = f"there was a {one} {place} the {adjective} {two}"
    elif form == 4:
        text = f"the {one} is {adjective}, and the {two} is {draw.choice(ADJECTIVES)}"
    elif form == 5:
        text = f"{who} {verb} the {one} and then {draw.choice(VERBS)} the {two}"
    elif form == 6:
        text = f"no {one} was as {adjective} as the {two}"
    else:
        text = " ".join(draw.choices(LEXICON, k=draw.randint(6, 12)))
    return text[0].upper() + text[1:] + "."
