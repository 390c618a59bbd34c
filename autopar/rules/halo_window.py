"""Loops whose neighbours are needed: which part of a dim one device reads, and what its neighbours send it.

In: how a loop reads a dim of an operand (a `Window`), and in how many parts the loop is split. Out: `LocalWindow`: the
strips that neighbours send (the halo), and the window that is left to do on one device. Convolutions, their gradients
and pooling all read a dim alike: their loop's iteration `i` reads the elements at

    stride i - padding  <=  dilation p  <  stride i - padding + extent

A convolution's loop over results has its own stride, and the kernel's dilated length as extent. Its loop over the
kernel's elements, which are many where the convolution is a gradient with respect to a kernel, has the kernel's
dilation as stride, and the strided length of the results as extent.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LocalWindow:
    """One part of a split loop, on device `i` of those that split it.

    Args:
        low, high: elements that the device before, and the one after, sends.
        outside: elements beyond the strips, where some device needs them; they lie outside the operand.
        start, step: of the part so extended, the device reads from element `start + step * i` on.
        length: how many elements it reads.
        padding: of the local operation, before and after, in places of the dilated operand.
    """

    low: int
    high: int
    outside: tuple[int, int]
    start: int
    step: int
    length: int
    padding: tuple[int, int]

    def reads_own(self, own: int) -> bool:
        """Whether a device reads its own part, of so many elements, and nothing else."""
        return self.length == own and not (self.low or self.high or any(self.outside) or self.start or self.step)


@dataclass(frozen=True, slots=True)
class Window:
    """How a loop of `count` iterations reads a dim of `size` elements (see above). Of what follows the last element
    read, the operation passes over `slack` places."""

    size: int
    count: int
    stride: int
    extent: int
    padding: int
    dilation: int = 1
    slack: int = 0

    @property
    def can_be_split(self) -> bool:
        """Whether any number of parts divides it."""
        return any(self.local(parts) for parts in range(2, min(self.size, self.count) + 1))

    def local(self, num_parts: int) -> LocalWindow | None:
        """The part of one device; None where the loop or the dim does not divide, where the parts differ in more
        than their place, or where a device would need more than its two neighbours have.

        >>> Window(size=32, count=32, stride=1, extent=3, padding=1).local(8)
        LocalWindow(low=1, high=1, outside=(0, 0), start=0, step=0, length=6, padding=(0, 0))
        """
        if self.size % num_parts or self.count % num_parts:
            return None
        own, iterations = self.size // num_parts, self.count // num_parts
        if self.stride * iterations % self.dilation:
            return None
        step = self.stride * iterations // self.dilation  # by how much the first element read moves from part to part
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
        if step == own:  # what is there anyway needs no cutting off
            here = outside[0] + low + own + high + outside[1] - start
            length = min(here, length + self.slack // self.dilation)
        after = max(0, reach - 1 - before - (length - 1) * self.dilation)
        return LocalWindow(low, high, outside, start, step - own, length, (before, after))


@dataclass(frozen=True, slots=True)
class Halo:
    """A dim of a node's operand whose neighbours are read where `factor` is split."""

    operand: int
    dim: int
    factor: int
    window: Window
