#!/usr/bin/env python3
"""Holds that the library runs on any x86-64: check_instructions.py LIBRARY.

Instructions of AVX and later stand in the objects of kernels for an instruction set alone, whose names say so, and
those objects give the linker no function that it could take for another object's (an inline function, a template).
"""

import re
import subprocess
import sys

KERNEL = re.compile(r"_avx\w*\.cc\.o$")
VECTOR = re.compile(r"\t(v[a-z0-9]+|k[a-z]+[bwdq]|[a-z]+x) .*(%[yz]mm|%xmm|%k[0-7])|\tvzero")


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def by_object(text: str, heading: re.Pattern) -> dict[str, list[str]]:
    """The lines under each object's heading."""
    objects, lines = {}, []
    for line in text.splitlines():
        if match := heading.match(line):
            lines = objects.setdefault(match[1], [])
        else:
            lines.append(line)
    return objects


def main() -> int:
    library = sys.argv[1]
    code = by_object(output_of("objdump", "-d", "--no-show-raw-insn", library), re.compile(r"(\S+\.o):\s+file format"))
    symbols = by_object(output_of("nm", "-C", library), re.compile(r"(\S+\.o):$"))
    problems, vectors = [], 0
    for name, lines in code.items():
        found = [line.strip() for line in lines if VECTOR.search(line)]
        if KERNEL.search(name):
            vectors += len(found)
            problems += [f"{name} shares {line}" for line in symbols[name] if re.search(r" [WVu] ", line)]
        elif found:
            problems.append(f"{name} has {len(found)} instructions of AVX, the first: {found[0]}")
    if vectors == 0:
        problems.append(f"no kernel of {library} has instructions of AVX: this check looks past them")
    print("\n".join(problems) or f"{vectors} instructions of AVX, all in kernels")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
