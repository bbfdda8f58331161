"""The header of a GGUF file: its metadata, and the names and shapes of its tensors."""

from __future__ import annotations

from functools import cached_property

from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile


class Header(Metadata):
    """All that says something about the network. Keys that begin with a point are those of the architecture."""

    def __init__(self, file: GgufFile) -> None:
        super().__init__(file.metadata, file.path)
        self.file = file

    def has_tensor(self, name: str) -> bool:
        return name in self.file.entries

    @cached_property
    def in_layers(self) -> frozenset[str]:
        """The names of the tensors of any layer, without the layer; those of a hybrid model differ."""
        return frozenset(name.split(".", 2)[-1] for name in self.file.entries if name.startswith("blk."))

    def shape(self, name: str, dimensions: int = 2) -> tuple[int, ...]:
        """The shape of a tensor that every file of the architecture contains."""
        entry = self.file.entries.get(name)
        if entry is None or len(entry.shape) != dimensions:
            raise self.fail(f"the tensor {name!r} is missing or has another form: the file is not a complete model")
        return entry.shape
