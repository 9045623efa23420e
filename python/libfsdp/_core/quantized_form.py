"""The interface of parameters whose unsharded form has fewer bits than their shards: QuantizedForm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


QUANTIZED = "_libfsdp_quantized_form"  # The attribute of a parameter with its QuantizedForm, which makes fully_shard treat it as quantized.


class QuantizedForm(Protocol):
    """Converts a parameter's values to the quantized tensor with which modules compute, which has fewer bits than the shards."""

    def high_precision(self) -> torch.Tensor:
        """Returns the initial values of the shards. Called once."""
        ...

    def make(self, values: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns a quantized tensor of these values, and those of its inner tensors that are freed with the unsharded parameter."""
        ...

    def fill(self, values: torch.Tensor, whole: torch.Tensor) -> None:
        """Quantizes values into a tensor that was made before."""
        ...

    def renew(self, rows: torch.Tensor, shape: torch.Size, whole: torch.Tensor | None) -> torch.Tensor | None:
        """Called once after main parameters were written, with this rank's rows, before the rows are encoded.

        Args:
            rows: the rows that encode will get, or a part of them, if other ranks have the rest.
            whole: the unsharded tensor with which modules have computed, if there is one.

        Returns:
            This rank's largest value, as a tensor of one element, if rows can be encoded only when the largest value of all ranks is known
            (see set_largest). Otherwise None. All ranks return the same kind of result, each time.
        """
        ...

    def set_largest(self, largest: torch.Tensor) -> None:
        """Called with the largest of the values that the ranks' forms returned from renew."""
        ...

    def encode(self, rows: torch.Tensor, shape: torch.Size) -> list[torch.Tensor] | None:
        """Returns the tensors to send: this rank's rows, quantized without those of other ranks.

        There are as many rows as the first rank has; zeros fill up a shard with fewer. Returns None if rows that are quantized separately
        would not have the bits that they have in the unsharded parameter, which has `shape`; they are then sent unquantized. All ranks
        return the same kind of result, each time.
        """
        ...

    def decode(self, name: str, arrived: list[torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Returns the quantized tensor over the encoded rows of all ranks, rank by rank.

        It does not own their memory, which exists only while the unit is gathered.

        Args:
            arrived: one gathered tensor for each that encode returned.
            dtype: the dtype that the tensor has for its users.
        """
        ...

    def decoded(self, name: str, arrived: list[torch.Tensor], whole: torch.Tensor) -> None:
        """Called when new values have arrived in the memory of a decoded tensor."""
        ...

    def freed(self, whole: torch.Tensor) -> None:
        """Called when the unsharded parameter's memory has been freed."""
        ...
