"""Variants: choices of a rule among several ways to write one derivative, each with a name to disable it.

Which variant is fast depends on the runtime and the processor; all are correct. The default is the faster one, as
measured by ``python -m benchmarks.lowerings`` with each switch. The tests compare the derivatives of both settings.
"""

from __future__ import annotations

from typing import NamedTuple

from onnxgrad.context import ScopedSetting

#: The names of the lowerings that rules do not choose.
WITHOUT: ScopedSetting[frozenset[str]] = ScopedSetting("without_lowerings", frozenset())


class Lowering(NamedTuple):
    """A way to write a derivative where another would do.

    Attributes:
        name: what `onnxgrad.without_lowerings` calls it.
        where: what is differentiated.
        what: what is written.
        instead: what is written without it.
    """

    name: str
    where: str
    what: str
    instead: str

    @property
    def is_enabled(self) -> bool:
        """True if rules may choose this variant now."""
        return self.name not in WITHOUT.value


#: By name, in the order in which modules declare them.
LOWERINGS: dict[str, Lowering] = {}


def lowering(name: str, where: str, what: str, instead: str) -> Lowering:
    """Declare a `Lowering`."""
    made = LOWERINGS[name] = Lowering(name, where, what, instead)
    return made
