"""Reading the compiler's schedule of a Pallas kernel: bundles of instructions, one a cycle where nothing is waited for.

A kernel over a grid is one loop. What it does in some of the steps alone stands behind a branch that jumps over it.
"""

import re
from dataclasses import dataclass

_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: *>* *\{", re.MULTILINE)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel \([^)]*\) target = \$region(\d+)")
_DELAY = 5  # bundles from a branch to where it takes effect
_PRODUCT = "vmatmul"


@dataclass(frozen=True)
class KernelSchedule:
  """Cycles of a kernel that multiplies blocks.

  Attributes:
    step: in every step of the grid.
    products: in steps that have a block to multiply, beside it.
    row: for each row of the grid, to clear and to write its result.
  """

  step: int
  products: int
  row: int

  @staticmethod
  def parse(text: str) -> "KernelSchedule":
    """Reads the final bundles of a kernel."""
    starts = [found.start() for found in _BUNDLE.finditer(text)]
    bundles = [text[start:end] for start, end in zip(starts, (*starts[1:], len(text)), strict=True)]
    regions = {int(number): at for at, bundle in enumerate(bundles) for number in _REGION.findall(bundle)}
    jumps = [(at, regions[int(to)]) for at, b in enumerate(bundles) for to in _BRANCH.findall(b) if int(to) in regions]
    loops = [(to, at) for at, to in jumps if to <= at]
    assert len(loops) <= 1, f"a kernel of {len(loops)} loops is not read yet"
    first, last = loops[0] if loops else (0, len(bundles))  # a grid of one step needs none
    skipped = [(at + _DELAY, to) for at, to in jumps if to > at]
    multiplied = [(a, b) for a, b in skipped if any(_PRODUCT in bundle for bundle in bundles[a:b])]
    row = sum(b - a for a, b in skipped if (a, b) not in multiplied)
    products = min((b - a for a, b in multiplied), default=last - first - row)  # the innermost of those around it
    return KernelSchedule(last - first - products - row, products, row)

  def cycles(self, rows: int, steps: int, blocks: int, least: float = 0.0) -> float:
    """Of a grid of so many rows and steps, and blocks that are multiplied, for each of which units take `least`."""
    return steps * self.step + blocks * max(self.products, least) + rows * self.row
