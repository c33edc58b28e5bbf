"""Small helpers that every result shares: JSON without NaN, intervals and numbers in words."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

Interval = tuple[float, float]
UNKNOWN: Interval = (math.nan, math.nan)


def json_safe(value: Any) -> Any:
    """`value` with NaN and infinities as None and tuples as lists, as JSON needs it. An open end of an interval is None."""
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, (bool, str, int)) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def whole(value: float) -> float | int:
    """`value` as an int where it is one, so that JSON says 64 and not 64.0."""
    return int(value) if math.isfinite(value) and value == int(value) else value


def number(value: float, digits: int = 2) -> str:
    """A number to `digits` decimals, "unknown" for NaN, "unbounded" for an infinity; never "-0"."""
    if math.isnan(value):
        return "unknown"
    if math.isinf(value):
        return "unbounded"
    text = f"{value:.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def fixed(value: float, digits: int) -> str:
    """A number to exactly `digits` decimals, as a column of a table needs it; "unknown" for NaN."""
    return f"{value:.{digits}f}" if math.isfinite(value) else number(value)


def interval_text(interval: Interval, digits: int = 2) -> str:
    low, high = interval
    if math.isnan(low) and math.isnan(high):
        return "[unknown]"
    return f"[{number(low, digits)}, {number(high, digits)}]"


def power_of_two(log2_value: float) -> str:
    """A learning rate as 2^-7.5."""
    return "unknown" if math.isnan(log2_value) else f"2^{number(log2_value, 1)}"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns, two blanks between them."""
    widths = [max(len(row[index]) for row in [header, *rows]) for index in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]
    )


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
