"""A figure of a machine, and where it comes from. What nobody told us stays unknown."""

from typing import Literal, Self

from pydantic import model_validator

from moestro.config.base import Section

# measured: on such a device, with a public record. read: in the source named. derived: computed from figures read.
# secondary: an article about the source. recalled: from memory or a datasheet not read again. announced: not yet sold.
Confidence = Literal["measured", "read", "derived", "secondary", "recalled", "announced"]

UNSOURCED: tuple[Confidence, ...] = ("recalled", "secondary", "announced")


class Figure(Section):
    """One number of a device or a link, in the unit that its key names.

    nominal: what the vendor states. achieved: the best sustained rate that was measured, if any. Both None: unknown.
    Each has a source of its own and says how far it can be trusted.
    """

    nominal: float | None = None
    achieved: float | None = None
    source: str = ""
    confidence: Confidence | None = None
    achieved_source: str = ""
    achieved_confidence: Confidence = "measured"
    note: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for value in (self.nominal, self.achieved):
            if value is not None and value <= 0:
                raise ValueError(f"a figure is above zero, not {value:g}; leave it out where it is unknown")
        if self.nominal is not None and self.confidence is None:
            raise ValueError("a nominal figure says its confidence (measured, read, derived, secondary, recalled, ...)")
        if self.achieved is not None and not self.achieved_source:
            raise ValueError("an achieved figure names its achieved_source")
        # In-switch reduction and clocks above the datasheet's do occur, but then the nominal figure is not the ceiling.
        if self.nominal is not None and self.achieved is not None and self.achieved > self.nominal:
            raise ValueError(f"achieved {self.achieved:g} is above nominal {self.nominal:g}")
        return self

    @property
    def best(self) -> float | None:
        """The achieved figure, or else the nominal one."""
        return self.nominal if self.achieved is None else self.achieved

    @property
    def known(self) -> bool:
        return self.best is not None

    @property
    def unsourced(self) -> bool:
        """Whether the output must say that the nominal figure was recalled, second-hand or announced."""
        return self.nominal is not None and self.confidence in UNSOURCED

    @property
    def unsourced_achieved(self) -> bool:
        """The same of the achieved figure."""
        return self.achieved is not None and self.achieved_confidence in UNSOURCED


UNKNOWN = Figure()
