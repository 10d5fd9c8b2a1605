"""The final examination of a model, and the model card that tells of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.evaluate import ASKED, LOSSES, NOTHING, Examiner, error_of
from training.model import Hybrid

GOALS = {("needle", 4096): 0.95, ("keys", 4096): 0.95, ("variables", 2048): 0.85, ("count", 2048): 0.80}
LENGTHS = (512, 1024, 2048, 4096, 8192)


ABLATED = ("keys", "needle", "variables", "count", "slots", "chat")


def samples_at(length: int, samples: int) -> int:
    """Fewer questions of long texts: about as much reading at each length from 1,024 tokens on."""
    return max(min(samples, 12), min(samples, samples * 1024 // length))


def examine(model: Hybrid, data: Path, samples: int, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """Exact answers by task and length, and NLL of text; prints as it goes."""
    examiner = Examiner(data)
    exact: dict[str, dict[str, float]] = {task: {} for task in ASKED}
    for task in ASKED:
        for length in lengths:
            exact[task][str(length)] = examiner.exact(model, task, length, samples_at(length, samples))
        print(f"{task:10}" + " ".join(f"{length}: {share:.2f}" for length, share in exact[task].items()), flush=True)
    nll = {str(length): examiner.text(model, length, samples_at(length, samples)) for length in lengths}
    for at, (first, whole) in nll.items():
        print(f"text, {at} tokens: {whole:.3f} nats a token, {first:.3f} in the first 8", flush=True)
    return {"samples": samples, "exact": exact, "text": nll}


def ablate(
    model: Hybrid, data: Path, samples: int, lengths: tuple[int, ...] = (1024, 2048), tasks: tuple[str, ...] = ABLATED
) -> dict[str, Any]:
    """What cuts take away; prints a table and returns it with the verdict.

    The KV-wipe must destroy look-up, or the linear layers do what attention is for; zero states must hurt where states
    matter: counting, hits inside a question, the first tokens of a text.
    """
    examiner = Examiner(data)
    exact: dict[str, dict[str, dict[str, float]]] = {}
    for length in lengths:
        for task in tasks:
            asked = samples_at(length, samples)
            row = {loss.name: examiner.exact(model, task, length, asked, loss) for loss in LOSSES}
            exact.setdefault(task, {})[str(length)] = row
            print(f"{task:10} {length}: " + ", ".join(f"{k} {v:.2f}" for k, v in row.items()), flush=True)
    text = {
        str(length): {
            loss.name: examiner.text(model, length, samples_at(length, samples), loss)
            for loss in LOSSES
            if not loss.inside
        }
        for length in lengths
    }
    for at, losses in text.items():
        print(f"text       {at}: " + ", ".join(f"{k} {a:.3f}/{b:.3f}" for k, (a, b) in losses.items()), flush=True)
    return {"samples": samples, "exact": exact, "text": text}


def verdict(table: dict[str, Any]) -> list[str]:
    """Return sentences that say whether the model behaves as a hybrid; each begins with 'ok' or 'NOT'."""
    lines = []
    for task in ("keys", "needle"):
        for length, row in table["exact"].get(task, {}).items():
            full, wiped, inside = (row[name] for name in (NOTHING.name, "KV wiped", "zero states inside the question"))
            lines.append(_judged(wiped <= 0.05 < full, f"{task} at {length} without keys and values", wiped, full))
            lines.append(_judged(inside < 0.7 * full, f"{task} at {length}, zero inside the question", inside, full))
    for length, row in table["exact"].get("count", {}).items():
        zero, full = row["zero states"], row[NOTHING.name]
        lines.append(_judged(zero < 0.7 * full, f"count at {length} with zero states", zero, full))
    for length, row in table["text"].items():
        zero, full = row["zero states"][0], row[NOTHING.name][0]
        lines.append(_judged(zero > full + 0.1, f"first 8 tokens of text after {length}", zero, full))
    return lines


def _judged(good: bool, what: str, found: float, full: float) -> str:
    return f"{'ok' if good else 'NOT'}: {what}: {found:.2f}, with everything {full:.2f}"


def write_card(path: Path, results: dict[str, Any], table: dict[str, Any], about: dict[str, Any]) -> None:
    """Write the model card: what the model is, what it can and cannot do, as measured."""
    lengths = list(next(iter(results["exact"].values())))
    lines = [
        "# A small hybrid language model",
        "",
        f"{about['layers']}, {about['parameters'] / 1e6:.2f} M parameters, in the Qwen3.5 text architecture: it loads as",
        "`Qwen3_5ForCausalLM`. Made by `training/` of the tailreplay project, to have something trained to measure prefix",
        f"caching with: {about['tokens'] / 1e6:.1f} M tokens, {about['minutes']:.0f} minutes on {about['ranks']} cores.",
        "Apache-2.0; the text that it learnt from is named in `training/DATA.md`.",
        "",
        "It looks things up in a text, counts, keeps track of what changed, and follows short chains of variables, in the",
        "wordings of `training/tasks/` (each task there is a file whose first line says what it asks). It is **no**",
        "general assistant: its English is poor, it knows nothing of the world, and it",
        "cannot reason or follow other instructions.",
        "",
        f"Exact answers, greedy, on held-out words and text ({results['samples']} questions a cell; from 2,048",
        "tokens on fewer, at least 12):",
        "",
        "| task | " + " | ".join(f"{length} tokens" for length in lengths) + " |",
        "| --- |" + " --- |" * len(lengths),
    ]
    for task, row in results["exact"].items():
        lines.append(
            f"| {task} | " + " | ".join(f"{row[length]:.2f}" if length in row else "" for length in lengths) + " |"
        )
    lines.append(
        "| text, nats a token | " + " | ".join(f"{results['text'][length][1]:.2f}" for length in lengths) + " |"
    )
    open_goals = _open_goals(results)
    lines += ["", "Goals that were not reached:" if open_goals else "All goals were reached."]
    lines += [*([""] if open_goals else []), *open_goals]
    lines += [
        "",
        "Whether it behaves as a hybrid (states zero, or attention's keys and values gone, before the question):",
    ]
    lines += ["", *(f"* {line}" for line in verdict(table)), ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def _open_goals(results: dict[str, Any]) -> list[str]:
    """One line for each goal that was missed or not looked at."""
    found = []
    for (task, length), goal in GOALS.items():
        share = results["exact"].get(task, {}).get(str(length))
        if share is None:
            found.append(f"* {task} at {length} tokens: not measured, the goal was {goal:.2f}.")
        elif share < goal:
            error = error_of(share, samples_at(length, results["samples"]))
            found.append(f"* {task} at {length} tokens: {share:.2f} ± {error:.2f}, the goal was {goal:.2f}.")
    return found


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write results for later use."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
