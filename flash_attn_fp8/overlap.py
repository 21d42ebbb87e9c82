"""Whether strided tensors share memory: exact on their strides, not on the span of their bytes.

A tensor's elements lie at start + sum_k i_k stride_k with 0 <= i_k < n_k, and two tensors overlap
where one sum equals the other. So both questions below are whether sum_k a_k x_k = c has a solution
in 0 <= x_k <= u_k with all a_k > 0 (u - x stands for x where its sign is negative): a search over
the largest a first, cut off by the range and the divisor of what remains. It is short for the
tensors that there are, since their strides nest; past `_MAX_STEPS` the answer is yes.
"""

from __future__ import annotations

import math

from torch import Tensor

_MAX_STEPS = 20_000

Term = tuple[int, int]  # (a, u)


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether some byte belongs to an element of `a` and to one of `b`."""
    one, other = a.untyped_storage(), b.untyped_storage()
    start, other_start = one.data_ptr(), other.data_ptr()
    if start + one.nbytes() <= other_start or other_start + other.nbytes() <= start:
        return False  # the usual case, for a microsecond
    if a.numel() == 0 or b.numel() == 0:
        return False
    first, second = _byte_terms(a), _byte_terms(b)
    distance = b.data_ptr() - a.data_ptr()
    reach = sum(step * last for step, last in second)
    return _has_solution([*first, *second], distance + reach)


def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two elements of a tensor lie in one place."""
    if 0 in shape:
        return False
    axes = sorted((step, n - 1) for n, step in zip(shape, strides, strict=True) if n > 1)
    reach = 0
    for i, (step, last) in enumerate(axes):
        if step == 0:
            return True
        # Two places differ last in this axis, by 1 + x steps, made up for by those before.
        if step <= reach:
            before = [(s, 2 * n) for s, n in axes[:i]]
            if _has_solution([*before, (step, last - 1)], reach - step):
                return True
        reach += step * last
    return False


def _byte_terms(t: Tensor) -> list[Term]:
    size = t.element_size()
    axes = zip(t.shape, t.stride(), strict=True)
    return [(1, size - 1), *((step * size, n - 1) for n, step in axes)]


def _has_solution(terms: list[Term], total: int) -> bool:
    terms = _merged(terms)
    reach, divisor = [0], [0]  # of the terms before each
    for step, last in terms:
        reach.append(reach[-1] + step * last)
        divisor.append(math.gcd(divisor[-1], step))
    stack, steps = [(len(terms), total)], 0
    while stack:
        left, rest = stack.pop()
        if not 0 <= rest <= reach[left] or (divisor[left] and rest % divisor[left]):
            continue
        if left <= 1:
            return True  # in range, and a multiple of the one step
        step, last = terms[left - 1]
        lowest = max(0, -(-(rest - reach[left - 1]) // step))
        highest = min(last, rest // step)
        steps += max(1, highest - lowest + 1)
        if steps > _MAX_STEPS:
            return True
        stack += [(left - 1, rest - step * x) for x in range(lowest, highest + 1)]
    return False


def _merged(terms: list[Term]) -> list[Term]:
    """Terms with rising steps, those that continue the one before joined to it."""
    merged: list[Term] = []
    for step, last in sorted(terms):
        if step == 0 or last == 0:
            continue
        if merged:
            before, count = merged[-1]
            if step % before == 0 and step <= before * (count + 1):
                merged[-1] = before, count + step // before * last
                continue
        merged.append((step, last))
    return merged
