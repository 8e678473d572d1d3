"""The contents of files turned into arrays: idx (MNIST and its kin), LIBSVM text, and packed drawings."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from math import prod
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from bisls.data.errors import DataError


@dataclass(frozen=True, eq=False)
class Images:
    """Grey pictures with labels. The arrays are read-only, since all callers share them; `torch.tensor` copies.

    Attributes:
        train_x, test_x: Bytes, pictures x 28 x 28.
        train_y, test_y: Classes 0 to 9, int64.
        mean, sd: Of the training pictures divided by 255, as they are usually normalised.
    """

    train_x: NDArray[np.uint8]
    train_y: NDArray[np.int64]
    test_x: NDArray[np.uint8]
    test_y: NDArray[np.int64]
    mean: float
    sd: float


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of features with two classes. The arrays are read-only, since all callers share them; `torch.tensor` copies.

    Attributes:
        x: Dense float32, rows x features.
        y: -1 or +1, float32; the larger label of the file is +1.
    """

    x: NDArray[np.float32]
    y: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Drawings:
    """Drawings of many characters, a few of each. The arrays are read-only, since all callers share them.

    Attributes:
        x: Bytes, drawings x 28 x 28, ink bright.
        y: Which character, int64, from 0.
        names: Of the characters, as "part/alphabet/character".
    """

    x: NDArray[np.uint8]
    y: NDArray[np.int64]
    names: NDArray[np.str_]


def read_idx(contents: bytes, name: str, dims: int) -> NDArray[np.uint8]:
    """The bytes of an idx file as an array of `dims` dimensions; what does not fit its header is refused."""
    start = 4 + 4 * dims
    magic = bytes([0, 0, 8, dims])
    if contents[:4] != magic:
        raise DataError(f"{name} is not an idx file of {dims} dimensions: begins {contents[:4]!r}, expected {magic!r}")
    if len(contents) < start:
        raise DataError(f"{name} is cut off within its header, after {len(contents)} bytes of {start}")
    shape = struct.unpack(f">{dims}I", contents[4:start])
    if len(contents) != start + prod(shape):
        fault = "is cut off" if len(contents) < start + prod(shape) else "is too long"
        raise DataError(f"{name} {fault}: its header says {start + prod(shape)} bytes, it has {len(contents)}")
    return np.frombuffer(contents, np.uint8, offset=start).reshape(shape)


@dataclass(frozen=True)
class IdxPictures:
    """Four idx files: training pictures and labels, test pictures and labels."""

    mean: float
    sd: float

    def read(self, names: Sequence[str], contents: Sequence[bytes]) -> Images:
        """The arrays."""
        train_x, train_y, test_x, test_y = (
            read_idx(raw, name, dims) for raw, name, dims in zip(contents, names, (3, 1, 3, 1), strict=True)
        )
        for x, y, name in ((train_x, train_y, names[1]), (test_x, test_y, names[3])):
            if len(x) != len(y):
                raise DataError(f"{name} has {len(y)} labels for {len(x)} pictures")
        return Images(train_x, _frozen(train_y, np.int64), test_x, _frozen(test_y, np.int64), self.mean, self.sd)


@dataclass(frozen=True)
class LibsvmText:
    """One file of lines `label index:value ...` with two labels."""

    features: int

    def read(self, names: Sequence[str], contents: Sequence[bytes]) -> Table:
        """The arrays."""
        try:
            from sklearn.datasets import load_svmlight_file
        except ImportError as error:
            raise ImportError(f"reading {names[0]} needs scikit-learn: pip install 'bisls[cli]'") from error
        try:
            x, labels = load_svmlight_file(
                BytesIO(contents[0]), n_features=self.features, dtype=np.float32, zero_based=False
            )
        except ValueError as error:
            raise DataError(f"{names[0]} is not LIBSVM text with {self.features} features: {error}") from error
        kinds = np.unique(labels)
        if len(kinds) != 2:
            raise DataError(f"{names[0]} must have two kinds of labels, has {len(kinds)}")
        return Table(_frozen(x.toarray(), np.float32), _frozen(np.where(labels == kinds[1], 1, -1), np.float32))


@dataclass(frozen=True)
class PackedDrawings:
    """One npz file: `images` with two pixels of 16 greys in a byte, the left one in its high half; `labels`; `names`."""

    def read(self, names: Sequence[str], contents: Sequence[bytes]) -> Drawings:
        """The arrays."""
        try:
            with np.load(BytesIO(contents[0]), allow_pickle=False) as file:
                packed, labels, characters = file["images"], file["labels"], file["names"]
        except (ValueError, KeyError, OSError, EOFError, BadZipFile) as error:
            raise DataError(f"{names[0]} is no npz file of images, labels and names: {error}") from error
        if packed.dtype != np.uint8 or packed.ndim != 3 or len(packed) != len(labels):
            raise DataError(
                f"{names[0]} must have a label for each image of bytes, has {packed.shape} and {labels.shape}"
            )
        pixels = np.stack([packed >> 4, packed & 15], -1).reshape(len(packed), packed.shape[1], -1) * np.uint8(17)
        return Drawings(_frozen(pixels, np.uint8), _frozen(labels, np.int64), _frozen(characters, characters.dtype))


def _frozen(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    array = array.astype(dtype, copy=False)
    array.setflags(write=False)
    return array
