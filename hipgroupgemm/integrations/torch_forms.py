"""The forms of a ragged dot that torch's op has: how the last two axes of each operand lie, and which forms its derivatives are.

A form is written as operands of einsum are, without the batch axes that come first in each (after g): "mk,gkn" is the ragged dot whose rows
m are ragged, "km,kn" the one whose contracted axis k is, "bmk,bkn" a plain batch of products. Every operand may lie transposed ("km",
"gnk", "nk"), so derivatives are forms again, of the same tensors as they lie.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from hipgroupgemm.problem.dimension_numbers import RaggedDotDimensionNumbers

__all__ = ["BASIC_FORM", "Derivative", "is_grouped", "lhs_derivative", "numbers_of", "rhs_derivative"]

BASIC_FORM = "mk,gkn"


class Derivative(NamedTuple):
    """A derivative of a form: which two of lhs, rhs and out (its gradient) are multiplied, as which form; whether the result is the
    operand's transpose."""

    lhs: str
    rhs: str
    form: str
    transposed: bool


def is_grouped(form: str) -> bool:
    """Whether rhs has a group axis: then the rows of lhs are ragged."""
    return "g" in form


def is_batch(form: str) -> bool:
    """Whether it is a plain batch of products, in which nothing is ragged."""
    return form.startswith("b")


@functools.cache
def numbers_of(form: str, rank: int) -> RaggedDotDimensionNumbers:
    """The dimension numbers of a form for an lhs of `rank` axes.

    Raises:
        ValueError: no such form.
    """
    lhs, _, rhs = form.replace("b", "").partition(",")
    grouped = is_grouped(form)
    if sorted(lhs) != ["k", "m"] or sorted(rhs) != (["g", "k", "n"] if grouped else ["k", "n"]) or (grouped and is_batch(form)):
        raise ValueError(f"form={form!r}: wanted one such as 'mk,gkn' (rows ragged), 'km,kn' (contracted) or 'bmk,bkn' (batch)")
    batch = rank - 2
    lhs_axes = {letter: batch + place for place, letter in enumerate(lhs)}
    rhs_axes = {letter: batch + place for place, letter in enumerate(rhs)}
    batches = tuple(range(batch)), tuple(range(int(grouped), batch + int(grouped)))
    ragged = 0 if is_batch(form) else lhs_axes["m" if grouped else "k"]
    return RaggedDotDimensionNumbers((((lhs_axes["k"],), (rhs_axes["k"],)), batches), (ragged,), (0,) if grouped else ())


def _renamed(letters: str, **names: str) -> str:
    return "".join(names.get(letter, letter) for letter in letters)


@functools.cache
def lhs_derivative(form: str) -> Derivative:
    """How lhs's gradient is made of out's gradient and rhs."""
    lhs, _, rhs = form.partition(",")
    if is_grouped(form) or is_batch(form):  # (m, k): out's gradient (m, n) times rhs, n contracted
        batch = "b" if is_batch(form) else ""
        return Derivative("out", "rhs", f"{batch}mk,{_renamed(rhs, k='n', n='k')}", lhs.endswith("km"))
    # (k, m): row k of rhs times its group's slab of out's gradient (g, m, n), n contracted
    return Derivative("rhs", "out", f"{_renamed(rhs, k='m', n='k')},gnk", lhs == "mk")


@functools.cache
def rhs_derivative(form: str, transposed: bool = False) -> Derivative:
    """How rhs's gradient is made of lhs and out's gradient; `transposed`: it is wanted in memory with the last two axes exchanged."""
    lhs, _, rhs = form.partition(",")
    if is_batch(form):  # (k, n): lhs times out's gradient (m, n), m contracted
        return Derivative("lhs", "out", f"{_renamed(lhs, m='k', k='m')},bkn", rhs == "bnk")
    if not is_grouped(form):  # (k, n): row k of lhs times its group's slab of out's gradient (g, m, n), m contracted
        return Derivative("lhs", "out", f"{_renamed(lhs, m='k', k='m')},gkn", rhs == "nk")
    # (g, k, n): the rows m of each group contracted
    if transposed == (rhs == "gkn"):  # made as (g, n, k)
        return Derivative("out", "lhs", f"km,{_renamed(lhs, m='k', k='n')}", rhs == "gkn")
    return Derivative("lhs", "out", f"{_renamed(lhs, m='k', k='m')},kn", rhs == "gnk")
