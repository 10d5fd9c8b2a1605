"""What imports what: read off the source, and seen in a fresh interpreter."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tailreplay

SOURCE = Path(tailreplay.__file__).parent
FILES = {
    path.relative_to(SOURCE.parent).with_suffix("").as_posix().replace("/", "."): path for path in SOURCE.rglob("*.py")
}
FILES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}

# Modules that decide; none of them touches a tensor.
CORE = {
    "tailreplay.topology": {"errors"},
    "tailreplay.provenance": set(),
    "tailreplay.costs": {"topology"},
    "tailreplay.forgetting": {"page", "topology"},
    "tailreplay.budget": {"errors", "forgetting", "topology"},
    "tailreplay.modes": {"budget", "errors", "provenance"},
    "tailreplay.keys": {"errors"},
    "tailreplay.siblings": {"keys"},
    "tailreplay.slots": set(),
    "tailreplay.sizes": {"errors"},
    "tailreplay.anchor": {"keys", "page", "provenance"},
    "tailreplay.page": {"anchor", "keys", "provenance", "siblings"},
    "tailreplay.anchors": {"anchor", "eviction", "keys", "page", "provenance", "quotas", "siblings", "slots"},
    "tailreplay.quotas": {"errors", "keys", "sizes"},
    "tailreplay.eviction": {"page", "quotas"},
    "tailreplay.policies": {"costs", "errors", "eviction", "page"},
    "tailreplay.room": {"eviction", "page", "quotas", "slots"},
    "tailreplay.stand_ins": {"page", "provenance", "room"},
    "tailreplay.decisions": {"anchor", "page"},
    "tailreplay.events": {"keys", "page"},
    "tailreplay.matching": {"anchors", "decisions", "keys", "page", "provenance"},
    "tailreplay.catalog": {
        "anchors",
        "decisions",
        "errors",
        "events",
        "eviction",
        "keys",
        "matching",
        "page",
        "provenance",
        "quotas",
        "room",
        "sizes",
        "slots",
        "stand_ins",
    },
    "tailreplay.coverage": {"anchor", "budget", "decisions", "forgetting", "modes", "provenance", "topology"},
    "tailreplay.plan": {"anchor", "costs", "coverage", "decisions", "modes", "page", "provenance", "topology"},
}
# Packages that may know an engine's library.
OUTER = ("tailreplay.engines", "tailreplay.server", "tailreplay.commands", "tailreplay.bench")


def imports_of(source: str, module: str) -> Iterator[str]:
    """Yield every module that `source` imports anywhere in it, inside functions and for type checking too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(module.split(".")[: -node.level]) if node.level else ""
            base = ".".join(filter(None, [package, node.module]))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def run_fresh(code: str) -> list[object]:
    """Run `code` in a fresh interpreter and return the JSON list that it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    answer: list[object] = json.loads(done.stdout)
    return answer


def test_the_reader_of_imports_misses_none() -> None:
    source = """
import torch.nn
from a.b import c
from . import d
from ..e import f
if TYPE_CHECKING:
    import g
def function():
    from transformers import h
"""
    found = set(imports_of(source, "tailreplay.x.y"))
    assert found == {
        "torch.nn", "a.b", "a.b.c", "tailreplay.x", "tailreplay.x.d", "tailreplay.e", "tailreplay.e.f", "g",
        "transformers", "transformers.h",
    }  # fmt: skip


@pytest.mark.parametrize("module", CORE)
def test_core_modules_import_what_lies_below_them(module: str) -> None:
    found = {name for name in imports_of(FILES[module].read_text(), module) if name in FILES and name != "tailreplay"}
    assert found <= {f"tailreplay.{name}" for name in CORE[module]}


@pytest.mark.parametrize("module", CORE)
def test_core_modules_name_no_tensor_library(module: str) -> None:
    found = list(imports_of(FILES[module].read_text(), module))
    assert not [name for name in found if inside(name, "torch", "transformers", "vllm", "safetensors")]


@pytest.mark.parametrize("module", sorted(name for name in FILES if not inside(name, *OUTER)))
def test_only_the_outer_packages_know_an_engines_library(module: str) -> None:
    found = list(imports_of(FILES[module].read_text(), module))
    assert not [name for name in found if inside(name, "transformers", "vllm")]


@pytest.mark.parametrize("module", sorted(name for name in FILES if inside(name, "tailreplay.engines")))
def test_engines_never_import_each_other(module: str) -> None:
    own = ".".join(module.split(".")[:3])
    found = {name for name in imports_of(FILES[module].read_text(), module) if inside(name, "tailreplay.engines")}
    assert not [name for name in found - {"tailreplay.engines"} if not inside(name, own)]


def test_the_package_loads_neither_torch_nor_an_engine() -> None:
    heavy = ("torch", "transformers", "vllm", "numpy", "blake3")
    code = f"import json, sys, tailreplay; print(json.dumps([name for name in {heavy} if name in sys.modules]))"
    assert run_fresh(code) == []


def test_the_core_runs_without_torch() -> None:
    modules = ", ".join([*CORE, "tailreplay.cache", "tailreplay.cli", "tailreplay.bench.catalog"])
    names = "tailreplay.Ratio, tailreplay.Namespace, tailreplay.PrefixCache, tailreplay.Topology"
    code = f"""
import json, sys
import tailreplay, {modules}
tailreplay.PrefixCache("1GiB"), {names}
print(json.dumps([name for name in ("torch", "transformers", "vllm") if name in sys.modules]))
"""
    assert run_fresh(code) == []


def test_the_package_is_imported_at_once() -> None:
    # The best of several: what the import itself takes, not what else the machine is doing.
    code = """
import json, time
begin = time.perf_counter()
import tailreplay
print(json.dumps([time.perf_counter() - begin]))
"""
    assert min(float(str(run_fresh(code)[0])) for _ in range(5)) < 0.150


def test_public_names_are_there_and_others_are_not() -> None:
    light = set(tailreplay.__all__) - {"HybridLM"}
    assert all(getattr(tailreplay, name).__name__ == name for name in light)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = tailreplay.Nonsense
