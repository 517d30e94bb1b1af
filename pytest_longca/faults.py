"""Fault models: every way in which a kernel has been wrong in public, planted into a correct one. What the checks are proved on."""

from dataclasses import dataclass

from pytest_longca import faults_conditions, faults_lengths, faults_masks, faults_tensors
from pytest_longca.faulty import Bind, Fresh, make_faulty
from pytest_longca.kernel import Kernel


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to be wrong, and a mask on which it shows. `bind` plants it."""

    name: str
    family: str
    mask: str
    description: str
    bind: Bind | Fresh

    def plant(self, kernel: Kernel) -> Kernel:
        """The kernel with this fault. The kernel must take any predicate, as naive and sdpa do."""
        return make_faulty(kernel, self.name, self.bind)


def _faults() -> list[Fault]:
    rows = [*faults_masks.ROWS, *faults_tensors.ROWS, *faults_lengths.ROWS, *faults_conditions.ROWS]
    return [Fault(name, family, mask, description, bind) for family, name, mask, description, bind in rows]


FAULTS: dict[str, Fault] = {fault.name: fault for fault in _faults()}
"""All fault models by name."""
