"""Runs of a tiny model: the loss falls, and a run that was broken off goes on to the same bits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from training import checkpoint, journal
from training.initial import dt_bias_of
from training.loop import Trainer, weighted_loss
from training.model import Hybrid
from training.optimiser import Optimiser, orthogonal
from training.plan import Plan
from training.ranks import Ranks
from training.settings import DEFAULT, Settings, load_settings


def train(settings: Settings, data: Path, out: Path, steps: int | None) -> Trainer:
    trainer = Trainer(settings, data, out, Ranks())
    trainer.run(steps)
    return trainer


def test_a_run_that_was_broken_off_goes_on_to_the_same_bits(tiny: Settings, data: Path, tmp_path: Path) -> None:
    whole = train(tiny, data, tmp_path / "whole", 48)
    assert whole.plan.stage(whole.position.tokens)[0] == 1, "the test should cross a stage's end"
    for steps in (20, 5, 23):
        parts = train(tiny, data, tmp_path / "parts", steps)
    assert parts.position.tokens == whole.position.tokens
    ours, theirs = (checkpoint.read(tmp_path / name / checkpoint.FILE) for name in ("parts", "whole"))
    for group in ("model",):
        for name, value in theirs[group].items():
            assert torch.equal(ours[group][name], value), name
    for name, value in theirs["optimiser"]["momentum"].items():
        assert torch.equal(ours["optimiser"]["momentum"][name], value), name
    entries = journal.read(tmp_path / "whole" / journal.FILE)
    assert [entry["step"] for entry in entries if entry["event"] == "train"] == list(range(4, 49, 4))
    assert entries[-1]["text_nll"] < entries[0]["text_nll"] - 0.5
    assert (tmp_path / "whole" / journal.PICTURE).stat().st_size > 1000


def test_a_checkpoint_of_other_settings_is_refused(tiny: Settings, data: Path, tmp_path: Path) -> None:
    train(tiny, data, tmp_path, 2)
    other = dataclasses.replace(tiny, run=dataclasses.replace(tiny.run, seed=9))
    with pytest.raises(SystemExit, match="other settings"):
        Trainer(other, data, tmp_path, Ranks())
    # The clock's settings may change from one part of a run to the next.
    slower = dataclasses.replace(tiny, run=dataclasses.replace(tiny.run, minutes=1.0, tokens=10_000))
    assert Trainer(slower, data, tmp_path, Ranks()).plan.total == 10_000


def test_a_write_that_breaks_off_leaves_the_last_checkpoint(
    tiny: Settings, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = train(tiny, data, tmp_path, 2)

    def broken(state: object, file: object) -> None:
        file.write(b"half of it")  # type: ignore[attr-defined]
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path, trainer.model, trainer.optimiser, trainer.position, trainer.digest)
    assert checkpoint.read(tmp_path / checkpoint.FILE)["position"]["step"] == 2


def test_the_log_loses_what_lies_behind_the_checkpoint(tmp_path: Path) -> None:
    log = journal.Journal(tmp_path, 0)
    for step in (4, 8, 12):
        log.write("train", step)
    with log.path.open("a", encoding="utf-8") as file:
        file.write('{"event": "tra')
    journal.Journal(tmp_path, 8)
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [4, 8]


def test_text_and_answers_weigh_by_their_means(tiny: Settings) -> None:
    options = dataclasses.replace(tiny.optimiser, text_weight=0.5, answer_weight=2.0)
    nll, is_answer = torch.tensor([1.0, 3.0, *[5.0] * 60]), torch.tensor([False, False, *[True] * 60])
    assert weighted_loss(nll, is_answer, options) == 0.5 * 2 + 2.0 * 5
    assert weighted_loss(nll[:2], is_answer[:2], options) == 1.0
    assert weighted_loss(nll[:3], is_answer[:3], options) < 0.5 * 2 + 0.3, "one answer weighs less than many"
    assert weighted_loss(nll[:0], is_answer[:0], options) == 0.0


def test_muons_updates_are_nearly_orthogonal() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, 24, 80)))
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_horizons_stay_within_limits(tiny: Settings, model: Hybrid) -> None:
    optimiser = Optimiser(model.parameters, tiny.optimiser)
    mixer = model.model.model.layers[0].linear_attn
    with torch.no_grad():
        mixer.dt_bias.copy_(dt_bias_of(torch.tensor([1.01, 90_000.0])))
    for p in model.parameters.values():
        p.grad = torch.zeros_like(p)
    optimiser.step(1.0)
    horizons = 1 / torch.nn.functional.softplus(mixer.dt_bias.detach())
    torch.testing.assert_close(horizons, torch.tensor([2.0, 512.0]), rtol=1e-3, atol=0)


def test_every_parameter_is_in_one_optimiser(tiny: Settings, model: Hybrid) -> None:
    optimiser = Optimiser(model.parameters, tiny.optimiser)
    small = [id(p) for group in optimiser.adam.param_groups for p in group["params"]]
    muon = [id(model.parameters[name]) for name in optimiser.momentum]
    assert sorted(small + muon) == sorted(id(p) for p in model.parameters.values())
    slow = {id(p) for p in optimiser.adam.param_groups[1]["params"]}
    assert slow == {id(p) for n, p in model.parameters.items() if n.endswith(("A_log", "dt_bias", "in_proj_a.weight"))}


def test_the_plan_follows_the_speed_until_the_rate_falls() -> None:
    plan = Plan(load_settings(minutes=100.0, tokens=40_000_000), 40_000_000)
    assert not plan.fit(1_000_000, 600, 8000), "there is time enough"
    assert plan.fit(1_000_000, 3000, 3000)
    assert plan.total == 1_000_000 + 3000 * 3000
    assert not plan.fit(1_000_000, 3000, 3010), "hardly another speed"
    assert plan.fit(1_000_000, 3000, 5000)
    assert plan.total == 16_000_000
    assert not plan.fit(12_000_000, 5000, 9000), "the rate falls already"
    assert plan.fit(12_000_000, 5000, 3000)
    assert plan.total == 15_000_000
    assert plan.fit(14_900_000, 6001, 3000), "time is over"
    assert plan.total == 14_900_000


def test_the_rate_rises_stays_and_falls() -> None:
    plan = Plan(load_settings(), 10_000_000)
    rates = [plan.rate(tokens, 1000) for tokens in range(0, 10_000_000, 1_000_000)]
    assert rates[0] == rates[6] == 1
    assert rates[7:] == sorted(rates[7:], reverse=True)
    assert plan.rate(9_990_000, 1000) < 0.05
    assert plan.rate(0, 0) < 0.1


def test_the_curriculums_stages_follow_each_other() -> None:
    settings = load_settings()
    plan = Plan(settings, settings.run.tokens)
    found = [plan.stage(tokens)[0] for tokens in range(0, settings.run.tokens, 500_000)]
    assert found == sorted(found)
    assert set(found) == set(range(len(settings.stages)))
    long = sum(share for length, share in settings.stages[-1].lengths.items() if length >= 1024)
    assert long >= 0.4
    for stage in settings.stages:
        assert sum(stage.tasks.values()) == pytest.approx(1)
        assert sum(stage.lengths.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seed = 1", "sed = 1", r"\[run\] has a missing or unknown key"),
        ("hidden = 192", 'hidden = "wide"', "hidden must be of type int"),
        ("until = 1.0", "until = 0.9", "last stage must end"),
        ("tokens_per_step = 4096", "tokens_per_step = 100", "does not divide"),
        ("[model]", "[extra]\n[model]", "unknown table"),
    ],
)
def test_bad_settings_are_told_in_a_sentence(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(DEFAULT.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(SystemExit, match=said):
        load_settings(path)
