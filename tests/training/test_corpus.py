"""Prose out of manuals, the tokenizer, and packages that are not the ones we know."""

from __future__ import annotations

from pathlib import Path

import pytest
from training.corpus.clean import documents, is_prose, sentences
from training.corpus.fetch import Source, fetch, load_sources
from training.corpus.tokens import END, END_ID, PAD_ID, train_tokenizer

PROSE = "The river was quiet in the morning, and nobody in the old house had heard the boat come in."


def source(form: str, pattern: str = "*") -> Source:
    return Source("test", "debian", "no-such-package", "1", "0" * 64, "none", form, [pattern], ["index.*"])


@pytest.mark.parametrize(
    ("form", "name", "content"),
    [
        ("html", "a.html", f"<title>{PROSE}x.</title><script>var x;</script><p>{PROSE}</p><pre>{PROSE}y.</pre>"),
        ("html", "b.html", f"<div><table><tr><td>12</td></tr></table>\n{PROSE.replace('quiet', '<b>quiet</b>')}</div>"),
        ("pod", "c.pod", f"=head1 NAME\n\n{PROSE.replace('quiet', 'B<quiet>')}\n\n    my $code = 1;\n"),
        ("rst", "d.txt", f"Title\n=====\n\n.. note::\n\n{PROSE.replace('quiet', '``quiet``')}\n\n    code = 1\n"),
        ("rst", "e.txt", PROSE.replace("quiet", ":doc:`quiet </ref/quiet>`")),
        ("vim", "f.txt", f"*link*\n\n{PROSE.replace('quiet', '|quiet|')}\n"),
        ("dict", "g.txt", f"river\n\n    {PROSE.replace('quiet', '{quiet}')}\n"),
    ],
)
def test_prose_is_kept_and_markup_is_not(tmp_path: Path, form: str, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "index.html").write_text("<p>" + PROSE.replace("river", "lake") + "</p>", encoding="utf-8")
    assert documents(source(form), tmp_path) == [[PROSE]]


def test_repeats_are_left_out(tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        (tmp_path / name).write_text(f"<p>{PROSE}</p>", encoding="utf-8")
    assert documents(source("html"), tmp_path) == [[PROSE]]


def test_what_is_no_prose() -> None:
    assert is_prose(PROSE)
    assert not is_prose("Too short.")
    assert not is_prose(PROSE.rstrip("."))
    assert not is_prose("x = foo(1); y = bar[2]; z->w = 3; if (a && b) { return c; } else { d(); e(); }.")
    assert not is_prose(PROSE.replace("river", "rivière"))


def test_sentences_come_back_whole() -> None:
    assert sentences("One is here. Two is there? Three (e.g. this one) is last.") == [
        "One is here.",
        "Two is there?",
        "Three (e.g. this one) is last.",
    ]


def test_the_tokenizer_is_the_same_for_the_same_text() -> None:
    texts = [PROSE, "Question: What?\nAnswer: 123\n"] * 30
    one, two = train_tokenizer(texts, 400), train_tokenizer(texts, 400)
    assert one.to_str() == two.to_str()
    assert one.encode(f"{END}a").ids[0] == END_ID == 0
    assert PAD_ID == 1


def test_a_prompt_that_ends_with_the_answers_space_is_tokens_of_the_whole() -> None:
    tokenizer = train_tokenizer([PROSE, "Question: What?\nAnswer: Paris is red\n"] * 30, 400)
    for answer in ("123", "Paris", "red and blue"):
        prompt, whole = tokenizer.encode("\nAnswer: ").ids, tokenizer.encode(f"\nAnswer: {answer}\n").ids
        assert whole[: len(prompt)] == prompt
        assert tokenizer.decode(whole) == f"\nAnswer: {answer}\n"
    assert all(len(tokenizer.encode(digit).ids) == 1 for digit in "0123456789")
    assert len(tokenizer.encode("48213").ids) == 5


def test_another_package_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    wanted = source("html")
    (tmp_path / "packages" / "test").mkdir(parents=True)
    (tmp_path / "packages" / "test" / "p.deb").write_bytes(b"not what was pinned")
    with pytest.raises(SystemExit, match="SHA-256"):
        fetch(wanted, tmp_path)


def test_sources_say_where_they_are_from_and_under_which_licence() -> None:
    text = (Path(__file__).parents[2] / "training" / "DATA.md").read_text(encoding="utf-8")
    for one in load_sources():
        assert one.index in ("debian", "pypi")
        assert len(one.sha256) == 64
        assert f"`{one.package}`" in text
        assert one.licence in text
