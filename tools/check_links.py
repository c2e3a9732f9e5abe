#!/usr/bin/env python3
"""Checks that every relative link in the Markdown files, and every path they name in backticks, exists."""

import pathlib
import re
import subprocess
import sys

LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
NAMED = re.compile(r"`((?:src|include|cli|tests|tools|docs|examples|bench|fuzz|lab|cmake|python)/[\w./-]+)`")


def check(root):
    problems = []
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=root, capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        page = root / name
        text = page.read_text()
        for target in LINK.findall(text):
            if not (page.parent / target).exists():
                problems.append(f"{name}: the link to {target} leads nowhere")
        for target in NAMED.findall(text):
            if not (root / target).exists():
                problems.append(f"{name}: names {target}, which is not there")
    return problems


if __name__ == "__main__":
    found = check(pathlib.Path(__file__).resolve().parent.parent)
    for line in found:
        print(line)
    sys.exit(1 if found else 0)
