"""Quantities with units: durations, byte sizes, rates of links, shares and Kubernetes quantities.

A bare number where a unit is needed is refused, and the message shows both readings. Values keep SI or IEC meaning
exactly (`64G` is 64e9 bytes, `64Gi` is 64 * 2**30); nothing is rounded while parsing.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_DURATION_UNITS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)}
_BYTE_UNITS = {
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip
_BIT_UNITS = {"kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9}
_NUMBER = r"(?P<number>\d+(?:\.\d+)?)"


LONGEST_DAYS = 3650
"""What is longer is a slip of the pen, and more than some clocks can wait."""


def parse_duration(text: object) -> float:
    """Seconds from `90s`, `1.5h`, `250ms`; several parts may follow each other (`1h30m`)."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        raise ValueError(f"{text} has no unit; write {text}s for seconds or {text}m for minutes")
    if not isinstance(text, str):
        raise ValueError(f"expected a duration such as 90s or 1h30m, got {text!r}")
    rest, total = text.strip(), Decimal(0)
    if re.fullmatch(_NUMBER, rest):
        raise ValueError(f"{rest} has no unit; write {rest}s for seconds or {rest}m for minutes")
    if not rest:
        raise ValueError("expected a duration such as 90s or 1h30m, got an empty text")
    while rest:
        match = re.match(_NUMBER + r"(?P<unit>ms|s|m|h|d)", rest)
        if match is None:
            raise ValueError(f"{text!r} is not a duration; units are ms, s, m, h, d, for example 90s or 1h30m")
        total += Decimal(match["number"]) * _DURATION_UNITS[match["unit"]]
        rest = rest[match.end() :]
    if total > LONGEST_DAYS * _DURATION_UNITS["d"]:
        raise ValueError(f"{text!r} is longer than {LONGEST_DAYS} days; leave a time out to have its default")
    return float(total)


def format_duration(seconds: float) -> str:
    """The shortest exact text that `parse_duration` reads back to the same value."""
    if seconds == int(seconds):
        whole = int(seconds)
        for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
            if whole and whole % size == 0:
                return f"{whole // size}{unit}"
        return f"{whole}s"
    return f"{Decimal(repr(seconds)):f}s"


def parse_bytes(text: object) -> int:
    """Bytes from a Kubernetes quantity (`64Gi`, `500M`); fractions must come out whole."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        raise ValueError(f"{text} has no unit; write {text}Gi ({text} x 2^30 bytes) or {text}G ({text} x 10^9 bytes)")
    if not isinstance(text, str):
        raise ValueError(f"expected a size such as 64Gi, got {text!r}")
    match = re.fullmatch(_NUMBER + r"(?P<unit>[A-Za-z]*)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 64Gi or 500M")
    number, unit = match["number"], match["unit"]
    if not unit:
        raise ValueError(
            f"{number} has no unit; write {number}Gi ({number} x 2^30 bytes) or {number}G ({number} x 10^9 bytes)"
        )
    if unit not in _BYTE_UNITS:
        if unit.upper() in {"KB", "MB", "GB", "TB", "PB"}:
            short = "k" if unit[0] in "kK" else unit[0].upper()
            iec = f"{unit[0].upper()}i"
            gib = Decimal(number) * _BYTE_UNITS[short] / _BYTE_UNITS[iec]
            exact = f"{number}{short} (= {float(gib):.4g}{iec})"
            raise ValueError(f"{text!r} reads two ways; write {exact} or {number}{iec}")
        raise ValueError(f"unknown unit {unit!r} in {text!r}; units are k, M, G, T, P and Ki, Mi, Gi, Ti, Pi")
    value = Decimal(number) * _BYTE_UNITS[unit]
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(value)


def format_bytes(size: int) -> str:
    """The shortest exact Kubernetes quantity of a byte count."""
    for unit in ("Pi", "Ti", "Gi", "Mi", "Ki", "P", "T", "G", "M", "k"):
        if size and size % _BYTE_UNITS[unit] == 0:
            return f"{size // _BYTE_UNITS[unit]}{unit}"
    return f"{Decimal(size) / 1024:f}Ki"  # exact: 1/1024 has ten decimals


def parse_bit_rate(text: object) -> int:
    """Bits per second from `100Mbit`; links are sold in bits, and bytes would be read eight times too fast."""
    match = re.fullmatch(_NUMBER + r"(?P<unit>kbit|Mbit|Gbit)(?:/s)?", text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not a rate of a link; write bits per second with kbit, Mbit or Gbit: 100Mbit")
    rate = Decimal(match["number"]) * _BIT_UNITS[match["unit"]]
    if rate < 1 or rate != int(rate):
        raise ValueError(f"{text!r} is not a whole number of bits per second, at least one")
    return int(rate)


def format_bit_rate(rate: int) -> str:
    """The shortest exact text that `parse_bit_rate` reads back to the same value."""
    unit, size = next((one for one in reversed(_BIT_UNITS.items()) if rate % one[1] == 0), ("kbit", 1000))
    return f"{Decimal(rate) / size:f}{unit}"


def parse_percent(text: object) -> float:
    """A share between 0 and 1 from `0.1%`."""
    match = re.fullmatch(_NUMBER + r"\s*%", text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not a share; write it in percent: 0.1%")
    return float(Decimal(match["number"]) / 100)


def format_percent(share: float) -> str:
    """The shortest exact text that `parse_percent` reads back to the same value."""
    return f"{(Decimal(repr(share)) * 100).normalize():f}%"


def parse_cpu(text: object) -> float:
    """Cores from a Kubernetes CPU quantity: `2`, `0.5`, `500m`."""
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        raise ValueError(f"expected cores such as 2 or 500m, got {text!r}")
    match = re.fullmatch(_NUMBER + r"(?P<unit>m?)", str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a CPU quantity; write cores (2, 0.5) or millicores (500m)")
    cores = Decimal(match["number"]) / (1000 if match["unit"] else 1)
    if cores <= 0:
        raise ValueError(f"{text!r}: a CPU quantity must be above zero")
    return float(cores)


Seconds = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "description": "a duration with its unit, such as 90s or 1h30m"}),
]
"""Seconds in code, `90s` in documents."""

ByteSize = Annotated[
    int,
    BeforeValidator(parse_bytes),
    PlainSerializer(format_bytes, return_type=str),
    WithJsonSchema({"type": "string", "description": "a size with its unit, such as 64Gi or 500M"}),
]
"""Bytes in code, `64Gi` in documents."""

StoredBytes = Annotated[
    int,
    BeforeValidator(
        lambda value: value if isinstance(value, int) and not isinstance(value, bool) else parse_bytes(value)
    ),
    PlainSerializer(format_bytes, return_type=str),
    WithJsonSchema({"type": "string", "description": "a size with its unit, such as 64Gi or 500M"}),
]
"""The same in what components write: code may build it from plain bytes."""

Cores = Annotated[
    float,
    BeforeValidator(parse_cpu),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}], "description": "cores, such as 2, 0.5 or 500m"}),
]
"""Cores in code; a number or `500m` in documents."""

BitRate = Annotated[
    int,
    BeforeValidator(parse_bit_rate),
    PlainSerializer(format_bit_rate, return_type=str),
    WithJsonSchema({"type": "string", "description": "bits per second with their unit, such as 100Mbit"}),
]
"""Bits per second in code, `100Mbit` in documents."""

Percent = Annotated[
    float,
    BeforeValidator(parse_percent),
    PlainSerializer(format_percent, return_type=str),
    WithJsonSchema({"type": "string", "description": "a share in percent, such as 0.1%"}),
]
"""A share between 0 and 1 in code, `0.1%` in documents."""
