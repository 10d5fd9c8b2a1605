"""`tailreplay doctor`: what is installed, and what will not work."""

from __future__ import annotations

import argparse

from tailreplay.doctor import examine


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    return argparse.ArgumentParser(
        prog="tailreplay doctor",
        description="Say what is installed and what will not work with it; the exit status is 1 if something will not.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; returns the exit status."""
    findings = examine()
    for finding in findings:
        print(f"{'ok  ' if finding.good else 'BAD '}{finding.text}")
    return int(not all(finding.good for finding in findings))
