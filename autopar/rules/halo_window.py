"""Loops that read beyond their own part of a dim: the elements that one device reads, and its halo.

In: how a loop reads a dim of an operand (a `Window`), and the number of parts into which the loop is split. Out:
`LocalWindow`: the halo slices that the neighbours send, and the window of the local operation. Convolutions, their
gradients and pooling all read a dim in the same way. Iteration `i` of their loop reads the elements `p` with

    stride i - padding  <=  dilation p  <  stride i - padding + extent

A convolution's loop over results has the convolution's stride; its extent is the length of the dilated kernel. Its loop
over the kernel's elements, of which the gradient with respect to a kernel has many, has the kernel's dilation as
stride; its extent is the length that the results cover with their stride.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LocalWindow:
    """The part of a split loop that runs on device `i`.

    Args:
        low, high: the number of elements that the previous and the next device send.
        outside: the number of elements before and after the halo slices that some device needs; they lie outside the
            operand.
        start, step: the device reads its extended part from element `start + step * i` on.
        length: the number of elements that it reads.
        padding: the padding of the local operation, before and after, in positions of the dilated operand.
    """

    low: int
    high: int
    outside: tuple[int, int]
    start: int
    step: int
    length: int
    padding: tuple[int, int]

    def reads_own(self, own: int) -> bool:
        """Whether a device reads its own part, of `own` elements, and nothing else."""
        return self.length == own and not (self.low or self.high or any(self.outside) or self.start or self.step)


@dataclass(frozen=True, slots=True)
class Window:
    """How a loop of `count` iterations reads a dim of `size` elements (see above). The operation skips `slack`
    positions after the last element that it reads."""

    size: int
    count: int
    stride: int
    extent: int
    padding: int
    dilation: int = 1
    slack: int = 0

    @property
    def can_be_split(self) -> bool:
        """Whether there is a number of parts into which the loop can be split."""
        return any(self.local(parts) for parts in range(2, min(self.size, self.count) + 1))

    def local(self, num_parts: int) -> LocalWindow | None:
        """The part of one device, or None if the loop cannot be split into so many parts.

        A split is impossible if the number does not divide the loop or the dim, if the parts differ in more than their position, or
        if a device needs more than its two neighbours have.

        >>> Window(size=32, count=32, stride=1, extent=3, padding=1).local(8)
        LocalWindow(low=1, high=1, outside=(0, 0), start=0, step=0, length=6, padding=(0, 0))
        """
        if self.size % num_parts or self.count % num_parts:
            return None
        own, iterations = self.size // num_parts, self.count // num_parts
        if self.stride * iterations % self.dilation:
            return None
        step = self.stride * iterations // self.dilation  # distance between the first elements of neighbouring parts
        reach = self.stride * (iterations - 1) + self.extent
        first = -(self.padding // self.dilation)
        before = first * self.dilation + self.padding
        length = (reach - 1 - before) // self.dilation + 1
        if length < 1:
            return None
        last = num_parts - 1
        lows = [i * own - first - i * step for i in (0, 1, last)]
        highs = [first + i * step + length - (i + 1) * own for i in (0, last - 1, last)]
        low, high = max(0, *lows[1:]), max(0, *highs[:2])
        if max(low, high) > own:
            return None
        outside = max(0, lows[0] - low), max(0, highs[2] - high)
        start = outside[0] + low + first
        if step == own:  # keep elements that are present, instead of slicing them off
            here = outside[0] + low + own + high + outside[1] - start
            length = min(here, length + self.slack // self.dilation)
        after = max(0, reach - 1 - before - (length - 1) * self.dilation)
        return LocalWindow(low, high, outside, start, step - own, length, (before, after))


@dataclass(frozen=True, slots=True)
class Halo:
    """A dim of a node's operand that reads its neighbours' elements if `factor` is split."""

    operand: int
    dim: int
    factor: int
    window: Window
