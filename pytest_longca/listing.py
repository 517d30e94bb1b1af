"""What --longca-list prints: the matrix of kernels against masks with every reason, from declarations alone."""

from typing import TYPE_CHECKING

from pytest_longca.outcome import NotVerified
from pytest_longca.report.matrix import LISTED
from pytest_longca.report.record import Record
from pytest_longca.report.terminal import render

if TYPE_CHECKING:
    from pytest_longca.session import Session


def listing(session: "Session") -> str:
    """The matrix as text: a cell is open, or refused with its reason."""
    records = []
    names = session.kernels if session.options.kernels is not None else session.catalogue.kernel_names
    for kernel in names:
        for mask in session.masks:
            outcome = session.cell_refusal(kernel, mask) or NotVerified("would run")
            records.append(Record(stage=LISTED, kernel=kernel, mask=mask, outcome=outcome.to_json(), reason=str(outcome)))
    return render(records)
