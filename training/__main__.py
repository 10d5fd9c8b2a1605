"""``python -m training``: prepare data, train, examine and export the bundled model. See README.md."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from training.settings import DEFAULT, Settings, load_settings

_DATA, _OUT = Path("out/training/data"), Path("out/training/run")


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    top = argparse.ArgumentParser(prog="tailreplay-train", description=__doc__.split(":", 1)[1].strip())
    commands = top.add_subparsers(dest="command", required=True)
    options = {
        "data": "fetch and clean the text, train the tokenizer",
        "train": "train, or go on from the last checkpoint",
        "rank": "one process of train",
        "examine": "exact answers by task and length",
        "ablate": "what is lost without states, and without keys and values",
        "export": "write the model folder, with its card",
        "plot": "draw the log",
        "speed": "tokens a second of training on one thread",
    }
    for name, text in options.items():
        one = commands.add_parser(name, help=text)
        one.add_argument("--config", type=Path, default=DEFAULT)
        one.add_argument("--data", type=Path, default=_DATA, help="data folder (default: %(default)s)")
        one.add_argument("--out", type=Path, default=_OUT, help="run folder (default: %(default)s)")
        if name in ("data", "train"):
            one.add_argument("--accept-changed", action="store_true", help="take another version of a package")
        if name in ("train", "rank"):
            one.add_argument("--tokens", type=int, help="length of the run, instead of the config's")
            one.add_argument("--minutes", type=float, help="time that the run may take, instead of the config's")
            one.add_argument("--ranks", type=int, help="processes, instead of the config's")
            one.add_argument("--steps", type=int, help="stop after so many steps of this call")
        if name in ("examine", "ablate", "export"):
            one.add_argument(
                "--samples", type=int, default=40, help="questions of up to 1,024 tokens (default: %(default)s)"
            )
            one.add_argument("--lengths", type=int, nargs="+", help="text lengths in tokens")
        if name in ("examine", "ablate"):
            one.add_argument("--model", type=Path, help="an exported folder, instead of the run's checkpoint")
        if name == "export":
            one.add_argument("--to", type=Path, default=Path("out/training/model"), help="(default: %(default)s)")
            one.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    import sys

    given = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(given)
    overrides = {key: getattr(options, key, None) for key in ("tokens", "minutes", "ranks")}
    settings = load_settings(options.config, **overrides)
    return int(_COMMANDS[options.command](options, settings, given[1:]) or 0)


def _data(options: argparse.Namespace, settings: Settings, _: list[str]) -> int:
    from training.corpus.prepare import prepare

    manifest = prepare(options.data, settings.model.vocabulary, options.accept_changed)
    print(f"{options.data} is ready ({manifest['sha256'][:16]})")
    return 0


def _train(options: argparse.Namespace, settings: Settings, given: list[str]) -> int:
    from training.kernels.build import kernels
    from training.ranks import launch

    kernels()
    _data(options, settings, [])
    return launch([argument for argument in given if argument != "--accept-changed"], settings.run.ranks)


def _rank(options: argparse.Namespace, settings: Settings, _: list[str]) -> int:
    import json

    from training.corpus.prepare import READY
    from training.loop import Trainer
    from training.ranks import Ranks

    ranks = Ranks()
    digest = json.loads((options.data / READY).read_text(encoding="utf-8"))["sha256"]
    position = Trainer(settings, options.data, options.out, ranks, digest).run(options.steps)
    if ranks.first:
        print(
            f"{position.tokens / 1e6:.2f} M of {position.total / 1e6:.2f} M tokens, {position.seconds / 60:.1f} minutes"
        )
    ranks.close()
    return 0


def _model(options: argparse.Namespace, settings: Settings) -> tuple[Any, dict[str, Any]]:
    """The run's model, or an exported one, and what is known of how it came about."""
    import torch

    from training.checkpoint import FILE, read, set_weights
    from training.model import Hybrid, library_model

    torch.set_flush_denormal(True)
    if getattr(options, "model", None):
        from transformers import AutoModelForCausalLM

        return Hybrid(AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32), torch.bfloat16), {}
    path = options.out / FILE
    if not path.exists():
        raise SystemExit(f"There is no checkpoint at {path}; train first.")
    model = Hybrid(library_model(settings.model), torch.bfloat16)
    state = read(path)
    set_weights(model, state["model"])
    return model, state["position"]


def _lengths(options: argparse.Namespace, default: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(options.lengths) if options.lengths else default


def _examine(options: argparse.Namespace, settings: Settings, _: list[str]) -> int:
    from training.card import LENGTHS, examine, write_json

    results = examine(_model(options, settings)[0], options.data, options.samples, _lengths(options, LENGTHS))
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "examination.json", results)
    return 0


def _ablate(options: argparse.Namespace, settings: Settings, _: list[str]) -> int:
    from training.card import ablate, verdict, write_json

    table = ablate(_model(options, settings)[0], options.data, options.samples, _lengths(options, (1024, 2048)))
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "ablation.json", table)
    lines = verdict(table)
    print("\n".join(lines))
    return int(any(line.startswith("NOT") for line in lines))


def _export(options: argparse.Namespace, settings: Settings, _: list[str]) -> int:
    from training.card import LENGTHS, ablate, examine, write_card, write_json
    from training.export import export

    model, position = _model(options, settings)
    export(model, options.data / "tokenizer.json", options.to, options.dtype)
    lengths = _lengths(options, LENGTHS)
    results = examine(model, options.data, options.samples, lengths)
    table = ablate(model, options.data, options.samples, tuple(x for x in lengths if x in (1024, 2048)) or lengths[:1])
    write_json(options.out / "examination.json", results)
    write_json(options.out / "ablation.json", table)
    about = {
        "layers": f"{len(settings.model.layers)} layers ({settings.model.layers}), hidden {settings.model.hidden}",
        "parameters": sum(p.numel() for p in model.parameters.values()),
        "tokens": position["tokens"],
        "minutes": position["seconds"] / 60,
        "ranks": settings.run.ranks,
    }
    write_card(options.to / "README.md", results, table, about)
    print(f"{options.to} is written")
    return 0


def _plot(options: argparse.Namespace, settings: Settings, _: list[str]) -> int:
    from training.journal import draw

    print(draw(options.out))
    return 0


def _speed(options: argparse.Namespace, settings: Settings, _: list[str]) -> int:
    import torch

    from training.speed import measure

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    for length, (busy, wall) in measure(settings, clock=(time.process_time, time.perf_counter)).items():
        print(f"{length} tokens: {busy:.0f} tokens a second of processor time, {wall:.0f} of the clock")
    return 0


_COMMANDS = {
    "data": _data,
    "train": _train,
    "rank": _rank,
    "examine": _examine,
    "ablate": _ablate,
    "export": _export,
    "plot": _plot,
    "speed": _speed,
}

if __name__ == "__main__":
    raise SystemExit(main())
