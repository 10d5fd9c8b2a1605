"""Looking up: needles, a long list of keys, chains of variables. Questions come after the whole document."""

from __future__ import annotations

from tailreplay.evals.document import Document, Hit, Probe
from tailreplay.evals.tasks.base import Draw

QUESTIONS, SINGLE_HITS = 10, 5
_NEEDLE = "The special magic number for {key} is {value}."
_ASK = "Question: What is the special magic number for {key}?\nAnswer:"


def single_needle(draw: Draw) -> Document:
    """One fact in the first half of prose (RULER's niah_single), asked for at hits in the second."""
    (key,), value, writer = draw.names(1), draw.digits(5), draw.writer
    whole = writer.limit
    filler = draw.material.filler(draw.rng)
    writer.limit = whole // 2
    (start,) = writer.scatter([_NEEDLE.format(key=key, value=value)], filler)
    writer.limit = whole
    writer.scatter([], filler)
    probe = writer.probe(_ASK.format(key=key), value, start)
    stops = sorted(draw.rng.sample(range(whole // 2, whole + 1), SINGLE_HITS))
    return Document(tuple(writer.ids), tuple(Hit(stop, (probe,)) for stop in stops))


def many_needles(draw: Draw) -> Document:
    """Facts of one form about many keys (RULER's niah_multikey)."""
    count = max(QUESTIONS, min(60, draw.writer.limit // 40))
    facts = {key: draw.digits(5) for key in draw.names(count)}
    statements = [_NEEDLE.format(key=key, value=value) for key, value in facts.items()]
    starts = draw.writer.scatter(statements, draw.material.filler(draw.rng))
    probes = [
        draw.writer.probe(_ASK.format(key=key), value, start)
        for (key, value), start in zip(facts.items(), starts, strict=True)
    ]
    return _asked_at_end(draw, probes[:QUESTIONS])


def many_values(draw: Draw) -> Document:
    """Three facts about each of a few keys; all three are asked for (RULER's niah_multivalue)."""
    count = max(5, min(12, draw.writer.limit // 160))
    facts = [(key, draw.digits(4)) for key in draw.names(count) for _ in range(3)]
    draw.rng.shuffle(facts)
    statements = [f"One of the special magic numbers for {key} is: {value}." for key, value in facts]
    starts = draw.writer.scatter(statements, draw.material.filler(draw.rng), ordered=True)
    probes = []
    for key in dict.fromkeys(key for key, _ in facts):
        values = [value for other, value in facts if other == key]
        first = min(start for start, (other, _) in zip(starts, facts, strict=True) if other == key)
        question = f"Question: What are all the special magic numbers for {key}?\nAnswer:"
        probes.append(draw.writer.probe(question, ", ".join(values), first, *values))
    return _asked_at_end(draw, probes[:5])


def key_value(draw: Draw) -> Document:
    """Keys and values throughout the document, as many as there are words for: far more than states can hold."""
    writer, end = draw.writer, " and so on"
    each = len(writer.encode(" elsewhere: 1234;"))
    closing = len(writer.encode(end))
    names = draw.names(min(len(draw.material.words), (writer.limit - closing) // (each + 1)))
    values = [draw.digits(4) for _ in names]
    entries = [f"{name}: {value};" for name, value in zip(names, values, strict=True)]
    while sum(len(writer.encode(" " + entry)) for entry in entries) > writer.limit - closing:
        entries.pop()
    writer.limit -= closing
    starts = writer.scatter(entries, draw.material.filler(draw.rng))
    writer.limit += closing
    # Not at a semicolon, which tokenizers join with the line's end.
    writer.add(end)
    asked = draw.rng.sample(range(len(entries)), QUESTIONS)
    return _asked_at_end(draw, [writer.probe(f"Get {names[one]}:", values[one], starts[one]) for one in asked])


def variables(draw: Draw) -> Document:
    """Chains of assignments in prose (RULER's variable tracking): the value of a variable two or more steps away."""
    chains = max(3, min(8, draw.writer.limit // 200))
    size = 4
    names = draw.names(chains * size)
    statements: list[tuple[int, str]] = []
    probes: list[tuple[str, str]] = []
    for chain in range(chains):
        value = draw.digits(5)
        own = names[chain * size : (chain + 1) * size]
        statements += [
            (chain, f"VAR {name} = {f'VAR {own[depth - 1]}' if depth else value};") for depth, name in enumerate(own)
        ]
        probes += [(own[depth], value) for depth in (2, 3)]
    # Chains are mixed; each keeps its own order.
    order = [chain for chain, _ in statements]
    draw.rng.shuffle(order)
    queues = {chain: [text for owner, text in statements if owner == chain] for chain in range(chains)}
    mixed = [queues[chain].pop(0) for chain in order]
    starts = draw.writer.scatter(mixed, draw.material.filler(draw.rng), ordered=True)
    where = {text.split()[1]: start for text, start in zip(mixed, starts, strict=True)}
    draw.rng.shuffle(probes)
    asked = [
        draw.writer.probe(f"Print VAR {name}:", value, where[names[names.index(name) // size * size]])
        for name, value in probes[:5]
    ]
    return _asked_at_end(draw, asked)


def _asked_at_end(draw: Draw, probes: list[Probe]) -> Document:
    ids = tuple(draw.writer.ids)
    return Document(ids, (Hit(len(ids), tuple(probes)),))
