"""`tailreplay doctor`: what is installed, and what will not work."""

from __future__ import annotations

import argparse

from tailreplay.doctor import Finding, examine
from tailreplay.doctor_server import examine_server
from tailreplay.doctor_storage import examine_remote, examine_storage


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog="tailreplay doctor",
        description="Say what is installed and what will not work with it; the exit status is 1 if something will not.",
    )
    asked = made.add_mutually_exclusive_group()
    asked.add_argument(
        "--url", help="ask a running vLLM server instead, such as http://127.0.0.1:8000, whether the cache works in it"
    )
    asked.add_argument(
        "--remote",
        metavar="URL",
        help="try a storage instead: a folder, redis://127.0.0.1:6379 or mooncake://127.0.0.1:50051?lend=64MiB",
    )
    return made


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; returns the exit status."""
    findings = _examine(arguments)
    for finding in findings:
        print(f"{'ok  ' if finding.good else 'BAD '}{finding.text}")
    return int(not all(finding.good for finding in findings))


def _examine(arguments: argparse.Namespace) -> list[Finding]:
    if arguments.url is not None:
        return examine_server(arguments.url)
    if arguments.remote is not None:
        return examine_remote(arguments.remote)
    return [*examine(), *examine_storage()]
