#!/usr/bin/env python3
"""make_golden.py: writes tests/golden/numerics.txt, what an independent implementation says about our formats.

    pip install numpy ml_dtypes
    python3 tools/make_golden.py tests/golden/numerics.txt

The conversions are those of ml_dtypes (float8_e4m3fn, float4_e2m1fn, float8_e8m0fnu, bfloat16) and of numpy
(float16). Where their contract differs from ours, the difference is put in here by hand, and nowhere else:

  e4m3   ml_dtypes has no saturation: beyond 448 (after rounding) it gives NaN. Ours saturates, so finite and
         infinite inputs are cut to +-448 first. Any NaN is 0x7F in ours, whatever its sign.
  e2m1   ml_dtypes' type has no NaN and what it makes of one is its own affair. Ours gives 0x7. Inputs are cut
         to +-6 first, so that saturation does not depend on ml_dtypes either.
  bf16   a NaN keeps its sign and upper payload bits and becomes quiet; ml_dtypes gives one fixed NaN.
  fp16   likewise; numpy keeps the payload, but may leave a NaN signalling.

Lines of the file (numbers in hexadecimal unless said; FP32 by its bits):

  decode FORMAT CODE FP32                    the value of a code
  near FORMAT FP32 C-4 ... C0 ... C+4        the codes of an FP32 that lies on a rounding boundary and of its four
                                             neighbours on either side (bits FP32-4 .. FP32+4)
  checksum FORMAT STREAM CHUNK(decimal) SUM  of 10^6 codes, see `stream` and `checksum`
"""
import sys

import ml_dtypes
import numpy as np

CHUNK = 1_000_000
CHUNKS = {"random": 10, "focused": 4}


def mix(z):
    """splitmix64's finaliser on an array of uint64 (arithmetic modulo 2^64)."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream(name, chunk):
    """FP32 bit patterns: `random` over all of them; `focused` with exponents 2^-27 .. 2^20, where our formats'
    ranges begin and end."""
    index = np.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=np.uint64)
    r = mix(index + np.uint64({"random": 0, "focused": 1 << 40}[name]))
    bits = (r >> np.uint64(32)).astype(np.uint32)
    if name == "focused":
        exponent = (np.uint64(100) + r % np.uint64(48)).astype(np.uint32)
        bits = (bits & np.uint32(0x807FFFFF)) | (exponent << np.uint32(23))
    return bits


def checksum(codes):
    """Depends on every code and its place in the chunk."""
    place = np.arange(codes.size, dtype=np.uint64) << np.uint64(16)
    return int(np.sum(mix(place | codes.astype(np.uint64)), dtype=np.uint64))


def encode(name, bits):
    bits = np.asarray(bits, dtype=np.uint32)
    x = bits.view(np.float32)
    nan = np.isnan(x)
    safe = np.where(nan, np.float32(0), x)
    high = (bits >> np.uint32(16)).astype(np.uint32)
    if name == "e4m3":
        codes = np.clip(safe, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return np.where(nan, 0x7F, codes)
    if name == "e2m1":
        codes = np.clip(safe, -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
        return np.where(nan, 0x7, codes)
    if name == "bf16":
        codes = safe.astype(ml_dtypes.bfloat16).view(np.uint16)
        return np.where(nan, high | 0x40, codes)
    if name == "fp16":
        with np.errstate(over="ignore"):
            codes = safe.astype(np.float16).view(np.uint16)
        return np.where(nan, (high & 0x8000) | 0x7E00 | ((bits >> np.uint32(13)) & 0x3FF), codes)
    raise ValueError(name)


def decode_lines(name, dtype, codes):
    values = np.array(codes, dtype=np.uint8).view(dtype).astype(np.float32).view(np.uint32)
    return [f"decode {name} {code:02x} {int(bits):08x}" for code, bits in zip(codes, values)]


def near_lines(name, dtype, positive_codes, beyond):
    """`beyond`: further magnitudes of interest above the largest value."""
    values = np.array(positive_codes, dtype=np.uint8).view(dtype).astype(np.float64)
    points = list((values[:-1] + values[1:]) / 2) + [values[-1]] + beyond
    lines = []
    for sign in (0, 0x80000000):
        for point in points:
            centre = int(np.float32(point).view(np.uint32)) | sign
            codes = encode(name, [centre + k for k in range(-4, 5)])
            lines.append(f"near {name} {centre:08x} " + " ".join(f"{int(c):02x}" for c in codes))
    return lines


def main():
    lines = ["# Made by tools/make_golden.py, which says what the lines mean. Not to be edited."]
    lines += decode_lines("e2m1", ml_dtypes.float4_e2m1fn, range(16))
    lines += decode_lines("e4m3", ml_dtypes.float8_e4m3fn, [c for c in range(256) if c & 0x7F != 0x7F])
    lines += decode_lines("e8m0", ml_dtypes.float8_e8m0fnu, range(255))
    lines += near_lines("e2m1", ml_dtypes.float4_e2m1fn, range(8), [7.0, 8.0])
    lines += near_lines("e4m3", ml_dtypes.float8_e4m3fn, range(127), [464.0, 480.0, 512.0])
    for name in ("e2m1", "e4m3", "bf16", "fp16"):
        for source, chunks in CHUNKS.items():
            for chunk in range(chunks):
                lines.append(f"checksum {name} {source} {chunk} {checksum(encode(name, stream(source, chunk))):016x}")
    with open(sys.argv[1], "w", encoding="ascii") as out:
        out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_golden.py OUTPUT")
    main()
