"""The training loop of one rank."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from training import checkpoint
from training.checkpoint import Position
from training.evaluate import NOTHING, WIPED, Examiner, cells
from training.initial import initialise
from training.journal import Journal, draw
from training.model import Hybrid, library_model
from training.optimiser import Optimiser
from training.plan import Plan
from training.ranks import Ranks
from training.settings import OptimiserSettings, Settings, Stage
from training.stream import NAMES, Batch, Stream, answered
from training.tasks.base import Kind

_EXAMS = {512: 16, 2048: 8, 4096: 4}
"""Questions a task at each length, while training."""
_WIPED = {512: 16, 1024: 8}
"""The same for look-up without keys and values, which must stay near 0."""
_FEWEST_ANSWERS = 48
_SPEED_OVER = 600.0
"""Seconds that a speed is taken over."""


@dataclass
class Tally:
    """Sums over steps, of this rank: per task answers counted and right; losses of both kinds."""

    counted: Tensor = field(default_factory=lambda: torch.zeros(len(NAMES), dtype=torch.float64))
    right: Tensor = field(default_factory=lambda: torch.zeros(len(NAMES), dtype=torch.float64))
    losses: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))

    def packed(self) -> Tensor:
        """All in one tensor, to be summed over ranks."""
        return torch.cat([self.counted, self.right, self.losses])


class Trainer:
    """One rank's share of a run.

    Parameters
    ----------
    settings : Settings
    data : Path
        The data folder.
    out : Path
        Where the checkpoint and the log go.
    ranks : Ranks
    data_digest : str
        Identity of the data: a checkpoint goes on with the same only.
    """

    def __init__(self, settings: Settings, data: Path, out: Path, ranks: Ranks, data_digest: str = "") -> None:
        torch.set_num_threads(1)
        # Decayed states end in denormals, which are many times slower.
        torch.set_flush_denormal(True)
        self.settings, self.data, self.out, self.ranks = settings, data, out, ranks
        self.digest = f"{settings.digest}-{data_digest[:16]}"
        library = library_model(settings.model)
        initialise(library, settings.model, settings.run.seed)
        self.model = Hybrid(library, torch.bfloat16)
        self.optimiser = Optimiser(self.model.parameters, settings.optimiser)
        out.mkdir(parents=True, exist_ok=True)
        found = checkpoint.load(out, self.model, self.optimiser, self.digest)
        self.position = found or Position(total=settings.run.tokens)
        # What time had shortened stays short until the speed is known again.
        self.plan = Plan(settings, min(self.position.total, settings.run.tokens))
        self.stream = Stream(data, settings.run.seed, ranks.rank, ranks.count)
        self.gradients = flat_gradients(self.model)

    def run(self, steps: int | None = None) -> Position:
        """Train to the plan's end, or for so many steps; leaves a checkpoint and returns where it is."""
        position, options = self.position, self.settings.run
        journal = Journal(self.out, position.step) if self.ranks.first else None
        last_step = math.inf if steps is None else position.step + steps
        began = time.monotonic() - position.seconds
        saved = examined = logged = position.seconds
        logged_tokens = position.tokens
        recent: deque[tuple[float, int]] = deque()
        tally = Tally()
        while position.tokens < self.plan.total and position.step < last_step:
            index, stage = self.plan.stage(position.tokens)
            batch = self.stream.batch(stage, position.step)
            scale = self.plan.rate(position.tokens, position.step)
            norm = self.learn(batch, scale, tally)
            position.step += 1
            position.tokens += stage.tokens_per_step
            if position.step % options.log_every:
                continue
            position.seconds = self.ranks.agreed(time.monotonic() - began)
            speed = (position.tokens - logged_tokens) / max(position.seconds - logged, 1e-6)
            changed = self._fit(recent)
            position.total = self.plan.total
            sums = self._reduced(tally)
            tally = Tally()
            if journal:
                journal.write("train", position.step, **self._entry(index, stage, scale, norm, speed, sums))
                if changed:
                    journal.write("plan", position.step, total=self.plan.total, reason="time")
            logged, logged_tokens = position.seconds, position.tokens
            if position.seconds - saved > options.checkpoint_minutes * 60:
                self._save()
                saved = position.seconds
            if position.seconds - examined > options.evaluate_minutes * 60:
                self._examine(journal)
                examined = logged = position.seconds = self.ranks.agreed(time.monotonic() - began)
        position.seconds = self.ranks.agreed(time.monotonic() - began)
        position.total = self.plan.total
        self._save()
        if steps is None:
            self._examine(journal)
        if journal and journal.path.exists():
            draw(self.out)
        return position

    def _fit(self, recent: deque[tuple[float, int]]) -> bool:
        """Let the plan follow the speed of the last minutes; a moment's slowness must not shorten the run."""
        now = (self.position.seconds, self.position.tokens)
        recent.append(now)
        while now[0] - recent[0][0] > _SPEED_OVER:
            recent.popleft()
        seconds = now[0] - recent[0][0]
        if seconds < _SPEED_OVER / 3:
            return False
        return self.plan.fit(now[1], now[0], (now[1] - recent[0][1]) / seconds)

    def learn(self, batch: Batch, scale: float, tally: Tally) -> float:
        """Take one step on a batch; adds to `tally` and returns the gradient's norm."""
        chosen = answered(batch)
        logits = self.model.logits(batch.ids, chosen)
        targets = batch.targets.flatten()[chosen]
        nll = F.cross_entropy(logits, targets, reduction="none")
        is_answer = batch.kinds.flatten()[chosen] == Kind.ANSWER
        loss = weighted_loss(nll, is_answer, self.settings.optimiser)
        loss.backward()
        self.ranks.mean(self.gradients)
        norm = self.optimiser.step(scale)
        self.gradients.zero_()
        with torch.no_grad():
            task = batch.tasks[torch.div(chosen, batch.ids.shape[1], rounding_mode="floor")]
            # Of plain text all tokens count as answers.
            shown = is_answer | (task == NAMES.index("text"))
            right = (logits.argmax(-1) == targets)[shown].double()
            tally.counted.index_add_(0, task[shown], torch.ones_like(right))
            tally.right.index_add_(0, task[shown], right)
            parts = [nll[~is_answer].sum(), (~is_answer).sum(), nll[is_answer].sum(), is_answer.sum()]
            tally.losses += torch.stack([part.double() for part in parts])
        return norm

    def _reduced(self, tally: Tally) -> Tensor:
        packed = tally.packed()
        self.ranks.sum(packed)
        if not torch.isfinite(packed).all():
            raise SystemExit("The loss is no number any more: lower the learning rates.")
        return packed

    def _entry(
        self, index: int, stage: Stage, scale: float, norm: float, speed: float, sums: Tensor
    ) -> dict[str, object]:
        counted, right, losses = sums.split([len(NAMES), len(NAMES), 4])
        text, texts, answer, answers = losses.tolist()
        tasks = {
            name: [round(float(r / c), 4), int(c)] for name, c, r in zip(NAMES, counted, right, strict=True) if c > 0
        }
        entry = {
            "tokens": self.position.tokens,
            "total": self.plan.total,
            "seconds": round(self.position.seconds, 1),
            "stage": stage.name,
            "stage_index": index,
            "rate": round(scale, 4),
            "norm": round(norm, 4),
            "tokens_per_second": round(speed),
            "text_nll": round(text / texts, 4) if texts else None,
            "answer_nll": round(answer / answers, 4) if answers else None,
            "tasks": tasks,
        }
        done = self.position.tokens / self.plan.total
        print(
            f"{done:6.1%} {stage.name}: step {self.position.step}, {speed:.0f} tokens/s, text {entry['text_nll']}, "
            f"answers {entry['answer_nll']}; " + " ".join(f"{name} {share:.2f}" for name, (share, _) in tasks.items()),
            flush=True,
        )
        return entry

    def _save(self) -> None:
        if self.ranks.first:
            checkpoint.save(self.out, self.model, self.optimiser, self.position, self.digest)

    def _examine(self, journal: Journal | None) -> None:
        """Ask held-out questions; ranks share the work."""
        examiner = Examiner(self.data)
        asked = [(task, length, NOTHING) for task, length in cells(_EXAMS)]
        asked += [(task, length, WIPED) for task, length in cells(_WIPED, ("keys", "needle"))]
        results = torch.zeros(len(asked) + 2, dtype=torch.float64)
        for index, (task, length, loss) in enumerate(asked):
            if index % self.ranks.count == self.ranks.rank:
                samples = (_EXAMS if loss is NOTHING else _WIPED)[length]
                results[index] = examiner.exact(self.model, task, length, samples, loss)
        if self.ranks.rank == self.ranks.count - 1:
            results[-2:] = torch.tensor(examiner.text(self.model, 1024, 12), dtype=torch.float64)
        self.ranks.sum(results)
        found: dict[str, dict[str, float]] = {}
        for (task, length, loss), share in zip(asked, results[:-2], strict=True):
            found[f"{task} {length}" + (", no KV" if loss is WIPED else "")] = {"exact": float(share)}
        found["text 1024"] = {"nll8": float(results[-2]), "nll": float(results[-1])}
        if journal:
            journal.write("evaluation", self.position.step, tokens=self.position.tokens, cells=found)
            draw(self.out)
            print(
                "held out: " + ", ".join(f"{k} {v['exact']:.2f}" for k, v in found.items() if "exact" in v), flush=True
            )


def weighted_loss(nll: Tensor, is_answer: Tensor, options: OptimiserSettings) -> Tensor:
    """Mean over text tokens plus mean over answer tokens, each with its weight.

    A few answer tokens do not count as much as many: a step of one long sequence may have a single answer.
    """
    text, answers = nll[~is_answer], nll[is_answer]
    return options.text_weight * text.sum() / max(1, len(text)) + options.answer_weight * answers.sum() / max(
        _FEWEST_ANSWERS, len(answers)
    )


def flat_gradients(model: Hybrid) -> Tensor:
    """Make all gradients views of one tensor, which ranks can sum at once; returns it."""
    parameters = list(model.parameters.values())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    at = 0
    for p in parameters:
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return flat
