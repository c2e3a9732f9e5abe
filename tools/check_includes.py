#!/usr/bin/env python3
"""Checks that folders include only what stands to their left, and that sources are all built.

The order is that of docs/architecture.md: base < numerics < checkpoint < layer < backend < ref | cpu | cuda < dist <
engine < cli | bindings. Public headers belong to the level named in PUBLIC. A source that no CMakeLists.txt names is an error too.
"""

import pathlib
import re
import sys

LEVELS = [["base"], ["numerics"], ["checkpoint"], ["layer"], ["backend"], ["ref", "cpu", "cuda"], ["dist"], ["engine"],
          ["cli", "bindings"]]
PUBLIC = {
    "error.h": "base", "types.h": "base", "progress.h": "base", "quantize.h": "numerics", "layout.h": "numerics",
    "layer.h": "layer", "moe_layer.h": "engine", "megamoe.h": "engine",
}
RANK = {folder: rank for rank, folders in enumerate(LEVELS) for folder in folders}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def folder_of(path):
    """The level a file or an include path belongs to, or None where the rule does not apply."""
    parts = pathlib.PurePath(path).parts
    if parts[0] == "megamoe":
        return PUBLIC.get(parts[1], "unknown public header")
    return parts[0]


def check(root):
    problems = []
    sources = [p for top in ("src", "cli", "include", "python") for p in sorted((root / top).rglob("*"))
               if p.suffix in (".h", ".cc", ".cu", ".cuh")]
    for path in sources:
        relative = path.relative_to(root)
        own = folder_of(relative if relative.parts[0] == "cli" else relative.relative_to(relative.parts[0]))
        is_test = path.stem.endswith("_test")
        for target in INCLUDE.findall(path.read_text()):
            theirs = folder_of(target) if "/" in target else own
            if is_test and theirs == "tests":  # what suites share
                continue
            if own not in RANK or theirs not in RANK:
                problems.append(f"{relative}: includes \"{target}\", whose folder is not in tools/check_includes.py")
            elif RANK[theirs] > RANK[own]:
                problems.append(f"{relative}: {own} may not include {theirs} (\"{target}\")")
            elif RANK[theirs] == RANK[own] and theirs != own and not is_test:
                problems.append(f"{relative}: {own} and {theirs} stand beside each other (\"{target}\")")
    cmake = {p.parent: p.read_text() for p in root.rglob("CMakeLists.txt") if "build" not in p.parts}
    for path in sources:
        if path.suffix in (".cc", ".cu"):
            owners = [text for folder, text in cmake.items() if folder in path.parents]
            if not any(path.name in text for text in owners):
                problems.append(f"{path.relative_to(root)}: no CMakeLists.txt builds it")
    return problems


if __name__ == "__main__":
    found = check(pathlib.Path(__file__).resolve().parent.parent)
    for line in found:
        print(line)
    sys.exit(1 if found else 0)
