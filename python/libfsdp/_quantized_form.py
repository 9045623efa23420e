"""What a parameter that is computed with in fewer bits than its shards have must tell: its QuantizedForm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


QUANTIZED = "_libfsdp_quantized_form"  # Of a parameter that fully_shard is to take as quantized: its QuantizedForm.


class QuantizedForm(Protocol):
    """How a parameter's whole values become what modules compute with, where that has fewer bits than the shards have."""

    def high_precision(self) -> torch.Tensor:
        """The values that the shards begin with; called once."""
        ...

    def make(self, values: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A quantized tensor, and those of its memory that come and go with the whole parameter."""
        ...

    def fill(self, values: torch.Tensor, whole: torch.Tensor) -> None:
        """Quantizes anew, into one that was made before."""
        ...

    def renew(self, rows: torch.Tensor, shape: torch.Size, whole: torch.Tensor | None) -> torch.Tensor | None:
        """Main parameters were written: called once, with this rank's rows, before these are encoded for the first time.

        Args:
            rows: as encode gets them, or parts of these that other ranks have the rest of.
            shape: of the whole parameter.
            whole: what modules have computed with, if they have.

        Returns:
            One element, if rows can be encoded only when the largest of all ranks' is known (see set_largest): this rank's. Else
            None. It is the same on all ranks, and each time.
        """
        ...

    def set_largest(self, largest: torch.Tensor) -> None:
        """Of what all ranks' forms gave when they were renewed, the largest."""
        ...

    def encode(self, rows: torch.Tensor, shape: torch.Size) -> list[torch.Tensor] | None:
        """This rank's rows (the first rank's number, with zeros behind fewer), quantized by themselves, as what travels.

        None: they have not the bits then that they have in the whole parameter, of `shape`, so they travel as they are. It is the same
        on all ranks, and each time.
        """
        ...

    def decode(self, name: str, arrived: list[torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The quantized tensor over what all ranks have encoded, rank by rank. Its memory comes and goes by itself.

        Args:
            name: of the parameter, for errors.
            arrived: one for each that was encoded.
            shape: of the tensor.
            dtype: that it says it has.
        """
        ...

    def decoded(self, name: str, arrived: list[torch.Tensor], whole: torch.Tensor) -> None:
        """Other values have arrived in the memory of a decoded tensor."""
        ...

    def freed(self, whole: torch.Tensor) -> None:
        """The whole parameter's memory is gone."""
        ...
