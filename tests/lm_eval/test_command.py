"""`tailreplay lm-eval`, run as a person runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager

from tailreplay import HybridLM
from tailreplay.cli import main
from tailreplay.commands import lm_eval as command
from tailreplay.evals.lm_eval import tasks as loading
from tests.lm_eval.conftest import Plain

QASPER = Path(lm_eval.tasks.__file__).parent / "longbench" / "qasper.yaml"
TASKS = ("niah_single_1", "ruler_vt", "ruler_fwe", "longbench_qasper_local")
METHODS = ("full", "zero", "replay 5%", "replay 100%", "exact")
TOKENS = 12


def local_task(folder: Path) -> None:
    """Write a LongBench task over two made-up articles."""
    articles = ["The study measured the sea at Riga. It was calm. " * 20, "Fifty sailors were asked about bread. " * 20]
    docs = [
        {"context": text, "question": "What was measured?", "answers": ["the sea"], "all_classes": []}
        for text in articles
    ]
    (folder / "qasper.json").write_text("\n".join(map(json.dumps, docs)))
    (folder / "local.yaml").write_text(
        f"include: {QASPER}\n"
        "task: longbench_qasper_local\n"
        "tag: null\n"
        "dataset_path: json\n"
        "dataset_name: null\n"
        f"dataset_kwargs:\n  data_files:\n    test: {folder / 'qasper.json'}\n"
    )


@pytest.fixture(scope="module")
def managers() -> list[TaskManager]:
    """Managers that the run made: an index of all tasks takes seconds."""
    return []


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, managers: list[TaskManager]) -> dict[str, Any]:
    """One run of every method over every task, as written to the file; the printed table is beside it."""

    def recorded(**arguments: Any) -> TaskManager:
        managers.append(TaskManager(**arguments))
        return managers[0]

    folder = tmp_path_factory.mktemp("tasks")
    local_task(folder)
    out = folder / "out" / "report.json"
    with pytest.MonkeyPatch.context() as patch:
        shown: list[Any] = []
        patch.setattr("rich.console.Console.print", lambda _, table: shown.append(table))
        patch.setattr(loading, "TaskManager", recorded)
        how = [
            "--dtype",
            "float32",
            "--method",
            "full",
            "zero",
            "replay",
            "exact",
            "--ratio",
            "0.05",
            "1",
            "--max-seq-lengths",
            "1024",
            "--limit",
            "2",
            "--log-samples",
        ]
        where = ["--include-path", str(folder), "--output", str(out)]
        settings = ["--gen-kwargs", json.dumps({"max_gen_toks": TOKENS})]
        status = main(["lm-eval", "--tasks", ",".join(TASKS[:2]), *TASKS[2:], *how, *where, *settings])
    assert status == 0
    (table,) = shown
    columns = {str(column.header): list(column.cells) for column in table.columns}
    return {**json.loads(out.read_text()), "table": columns}


def samples(report: dict[str, Any], method: str, task: str) -> list[tuple[str, str]]:
    """Return prompts and answers."""
    found = report["lm_eval"][method]["samples"][task]
    return [(sample["arguments"][0][0], sample["resps"][0][0]) for sample in found]


def rows(report: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if all(row[key] == value for key, value in wanted.items())]


@pytest.mark.parametrize("task", TASKS)
def test_full_prefill_gives_the_librarys_answers(
    report: dict[str, Any], hybrid: HybridLM, plain: Plain, task: str
) -> None:
    found = samples(report, "full", task)
    assert len(found) == 2
    assert [answer for _, answer in found] == [plain(hybrid.tokenizer.encode(prompt), TOKENS) for prompt, _ in found]
    for method in ("exact", "replay 100%"):
        assert samples(report, method, task) == found


@pytest.mark.parametrize("task", TASKS)
def test_the_share_that_was_reused_is_reported(report: dict[str, Any], task: str) -> None:
    (full,) = rows(report, task=task, method="full")
    assert (full["reused"], full["contexts"], full["retention"]) in ((0, 0, 1.0), (0, 0, None))
    for row in rows(report, task=task):
        if row["method"] != "full":
            assert row["contexts"] == row["samples"] == row["requests"] == 2
            assert 0.5 < row["reused_share"] < 1
            assert row["prompt_tokens"] == full["prompt_tokens"]
    (short,) = rows(report, task=task, ratio=0.05)
    assert short["replayed"] == pytest.approx(0.05 * short["reused"], abs=2)


def test_the_table_has_every_task_and_method(report: dict[str, Any]) -> None:
    table = report["table"]
    assert [name for name in table["task"] if name] == [*TASKS, "mean"]
    assert table["method"] == [*METHODS] * 5
    assert table["metric"][0] == "1024"
    assert table["reused"][0] == "0.0%"
    assert {row["metric"] for row in report["rows"]} == {"1024", "qa_f1_score"}


@pytest.fixture
def indexed(report: dict[str, Any], managers: list[TaskManager], monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the index of the run again."""
    monkeypatch.setattr(loading, "TaskManager", lambda **_: managers[0])


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run the command with bad input: returns its one sentence. No model may be loaded."""
    monkeypatch.setattr(HybridLM, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))

    def run(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["lm-eval", *arguments]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("tailreplay: ")
        assert shown.err.count("\n") == 1
        return shown.err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "fast"], "must be one of"),
        (["--ratio", "0"], "(0, 1]"),
        (["--ratio", "1.5", "--method", "replay"], "(0, 1]"),
        (["--ratio", "0.1", "--method", "full", "zero"], "goes with method 'replay' only"),
        (["--min-tail", "-1"], "must not be negative"),
        (["--limit", "0"], "--limit must be above 0"),
        (["--query-tokens", "0"], "--query-tokens must be above 0"),
        (["--max-length", "1000000"], "above the model's limit"),
        (["--max-seq-lengths", "1000000"], "above the"),
        (["--max-seq-lengths", "0"], "list of lengths"),
        (["--max-length", "2048", "--max-seq-lengths", "4096"], "Length 4096 is above the 2048 tokens"),
        (["--metadata", '{"max_seq_lengths": [1000000]}'], "above the"),
        (["--metadata", '{"max_seq_lengths": 4096}'], "list of lengths"),
        (["--metadata", "{"], "--metadata is not JSON"),
        (["--gen-kwargs", "[]"], "must be a JSON object"),
        (["--model", "/no/such/model"], "no model folder"),
        (["--device", "gpu"], "cannot be used"),
        (["--dtype", "int99"], "not a dtype"),
        (["--host-bytes", "much"], "not a size"),
        (["--output", "report.txt"], "must be a .json"),
        (["--output", "/proc/none/report.json"], "cannot be written"),
        (["--include-path", "/no/such/folder"], "no folder"),
    ],
)
def test_bad_input_gets_one_sentence(refused: Callable[..., str], arguments: list[str], message: str) -> None:
    assert message in refused("--tasks", "niah_single_1", *arguments)


@pytest.mark.usefixtures("indexed")
def test_unknown_tasks_are_named_with_what_was_meant(refused: Callable[..., str]) -> None:
    assert "no task 'niah_singel_1' (is it niah_single_1" in refused("--tasks", "niah_singel_1")


@pytest.mark.usefixtures("indexed")
def test_sampling_tasks_are_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    local_task(tmp_path)
    said = refused("--tasks", str(tmp_path / "local.yaml"), "--gen-kwargs", '{"do_sample": true, "temperature": 1}')
    assert "'longbench_qasper_local' wants sampled answers" in said


@pytest.mark.usefixtures("indexed")
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ConnectionError("Couldn't reach 'x' on the Hub"),
            "could not be fetched, is the hub reachable? (Couldn't reach",
        ),
        (ValueError("It has no split.\nMore."), "Task 'longbench_qasper' could not be loaded: It has no split."),
        (
            ImportError("No module named 'jieba'"),
            "needs packages that are not installed: pip install 'tailreplay[eval]'",
        ),
    ],
)
def test_data_that_cannot_be_had_is_one_sentence(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert message in refused("--tasks", "longbench_qasper")


def test_a_missing_harness_says_how_to_install_it(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert "pip install 'tailreplay[eval]'" in refused("--tasks", "niah_single_1")
