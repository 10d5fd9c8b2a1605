"""`tailreplay doctor`: what is installed, and what will not work."""

from __future__ import annotations

import argparse

from tailreplay.doctor import examine
from tailreplay.doctor_server import examine_server


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog="tailreplay doctor",
        description="Say what is installed and what will not work with it; the exit status is 1 if something will not.",
    )
    made.add_argument(
        "--url", help="ask a running vLLM server instead, such as http://127.0.0.1:8000, whether the cache works in it"
    )
    return made


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; returns the exit status."""
    findings = examine() if arguments.url is None else examine_server(arguments.url)
    for finding in findings:
        print(f"{'ok  ' if finding.good else 'BAD '}{finding.text}")
    return int(not all(finding.good for finding in findings))
