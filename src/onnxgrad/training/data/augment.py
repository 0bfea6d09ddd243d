"""Pictures in random variants while training: mirrored, moved, of other contrast, with a hole; masks move along.

The random numbers of a row are a function of the seed, the epoch and the index of the row alone: batches of any size,
in any order, by any thread and after any interruption have the same images. They come from SplitMix64 (Steele, Lea,
Flood 2014). Except for the zeros that `crop` adds, variants do not depend on the scale of the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.training.data.fields import Field

#: The default number of each variant.
_USUAL: dict[str, float] = {"flip": 0.5, "vflip": 0.5, "crop": 4, "jitter": 0.2, "erase": 0.5, "zoom": 0.5, "mosaic": 1}
#: Draws that each of them may take.
_DRAWS = 8
_GOLDEN = 0x9E3779B97F4A7C15
#: The least and the largest share of a picture that is erased, and the flattest rectangle (Zhong et al. 2020).
_AREA, _FLATTEST = (0.02, 1 / 3), 0.3


@dataclass(frozen=True)
class Augment:
    """Variants of pictures, applied in this order.

    Attributes:
        flip: how often a picture is mirrored, left to right.
        vflip: how often it is mirrored, top to bottom.
        crop: by how many pixels at most it is moved in each direction; zeros come in.
        jitter: each channel x with mean m and deviation s becomes m + c·(x − m) + d·s, for one c of 1 ± jitter
            (contrast) and one d of ± jitter (brightness) per picture.
        erase: how often a rectangle of 2 to 33 % of it takes the mean of its channel (Zhong et al. 2020).
        zoom: of pictures with boxes: scaled by 1 ± zoom, and put anywhere it fits or covers the canvas.
        mosaic: of pictures with boxes: how often three others stand beside it (Bochkovskiy et al. 2020).
    """

    flip: float = 0.0
    vflip: float = 0.0
    crop: int = 0
    jitter: float = 0.0
    erase: float = 0.0
    zoom: float = 0.0
    mosaic: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name == "crop" and not (number and value >= 0 and value == int(value)):
                raise BadInput(f"crop is a number of pixels, not {value!r}")
            if not number or (name != "crop" and not 0 <= value <= 1):
                raise BadInput(f"{name} lies between 0 and 1, not at {value!r}")

    @classmethod
    def of(cls, text: str) -> Augment:
        """Parse ``flip,crop=4,jitter=0.2,erase``; variants without a number use their default."""
        found: dict[str, float] = {}
        for piece in text.split(","):
            name, equals, value = (p.strip() for p in piece.partition("="))
            if name not in _USUAL:
                raise UnknownName(name, _USUAL, "augmentation")
            if name in found:
                raise BadInput(f"{text!r} names {name!r} twice")
            try:
                number = float(value) if equals else _USUAL[name]
            except ValueError:
                raise BadInput(f"{name} takes a number, as in {name}={_USUAL[name]}, not {value!r}") from None
            found[name] = int(number) if name == "crop" and number == int(number) else number
        return cls(**found)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ",".join(f"{name}={value:g}" for name, value in asdict(self).items() if value)

    def inputs(self, fields: Sequence[Field], shapes: Mapping[str, tuple[int | None, ...]], source: str) -> list[str]:
        """The inputs that read images, among those in `shapes` (of a row).

        Raises:
            BadInput: there are none, or labels would have to be moved with them.
        """
        if self.zoom or self.mosaic:
            raise BadInput("zoom and mosaic are variants of pictures with boxes\n  hint: --task detection")
        found = [f.name for f in fields if not f.label and f.name in shapes and _channels(shapes[f.name]) is not None]
        if not found:
            held = ", ".join(f"{f.name!r} ({f.wanted})" for f in fields if not f.label)
            raise BadInput(f"augmentation is of pictures, [N, C, H, W] or [N, H, W, C]; {source} feeds {held}")
        maps = self.maps(fields, shapes)
        for field in fields:
            moves = self.flip or self.vflip or self.crop
            if field.name in maps and self.crop and field.indices and field.ignored is None:
                raise BadInput(
                    f"crop moves the masks {field.name!r}, and no label says what is outside of them\n"
                    "  hint: an option of the loss does, as in dice:ignore_index=255"
                )
            if field.name in maps:
                continue
            if field.label and len(field.shape) > 1 and (moves or self.erase):
                raise BadInput(
                    f"the labels {field.name!r} are {field.wanted}, and would have to move with the pictures\n"
                    "  hint: of these variants, jitter alone leaves every pixel where it is"
                )
        return found

    def maps(self, fields: Sequence[Field], shapes: Mapping[str, tuple[int | None, ...]]) -> dict[str, float]:
        """The labels that are maps of the pictures (masks, depth), and the label beyond an edge.

        Their last two axes, or those before a last axis of size 1, are the height and the width of the pictures.
        """
        spaces = set()
        for field in fields:
            if not field.label and (axis := _channels(shapes.get(field.name, ()))) is not None:
                spaces.add(tuple(s for k, s in enumerate(shapes[field.name]) if k != axis))
        found: dict[str, float] = {}
        for field in fields:
            size = shapes.get(field.name, field.shape)
            space = tuple(s for k, s in enumerate(size) if k != size.index(1)) if len(size) == 3 and 1 in size else size
            if field.label and space in spaces:
                found[field.name] = 0 if field.ignored is None else field.ignored
        return found

    def move_maps(self, maps: np.ndarray, rows: np.ndarray, draw: Sequence[int], beyond: float) -> np.ndarray:
        """`maps` of pictures, moved as these are; `beyond` comes in."""
        flat = maps[..., 0] if maps.ndim == 4 and maps.shape[-1] == 1 else maps.reshape(len(maps), *maps.shape[-2:])
        chances = uniform(draw, rows, _DRAWS * len(_USUAL)).reshape(len(rows), -1, _DRAWS)
        found = np.stack([self._move(x[None], c[0], c[1], c[2], beyond)[0] for x, c in zip(flat, chances)])
        return found.reshape(maps.shape)

    def __call__(self, pictures: np.ndarray, rows: np.ndarray, draw: Sequence[int]) -> np.ndarray:
        """Variants of `pictures`, the `rows` of the data; `draw` is the seed and the epoch."""
        chances = uniform(draw, rows, _DRAWS * len(_USUAL))
        last = _channels(pictures.shape[1:]) == 2
        result = np.empty_like(pictures)
        for picture, chance, target in zip(pictures, chances, result):
            varied = self._augment_one(np.moveaxis(picture, -1, 0) if last else picture, chance.reshape(-1, _DRAWS))
            target[...] = np.moveaxis(varied, 0, -1) if last else varied
        return result

    def _augment_one(self, x: np.ndarray, chance: np.ndarray) -> np.ndarray:
        """A variant of one picture [C, H, W]."""
        flip, vflip, crop, jitter, erase = chance[:5]
        x = self._move(x, flip, vflip, crop, 0)
        if self.jitter:
            contrast, brightness = self.jitter * (2 * jitter[:2] - 1)
            wide = x.astype(np.float64)
            mean, deviation = (f(wide, axis=(1, 2), keepdims=True) for f in (np.mean, np.std))
            x = _as(mean + (1 + contrast) * (wide - mean) + brightness * deviation, x.dtype)
        if erase[0] < self.erase:
            x = x.copy()
            high, wide_ = x.shape[1:]
            area = high * wide_ * (_AREA[0] + (_AREA[1] - _AREA[0]) * erase[1])
            aspect = _FLATTEST ** (2 * erase[2] - 1)
            h = min(max(round((area * aspect) ** 0.5), 1), high)
            w = min(max(round((area / aspect) ** 0.5), 1), wide_)
            y0, x0 = int(erase[3] * (high - h + 1)), int(erase[4] * (wide_ - w + 1))
            mean = x.mean(axis=(1, 2), keepdims=True, dtype=np.float64)
            x[:, y0 : y0 + h, x0 : x0 + w] = _as(mean, x.dtype)
        return x

    def _move(self, x: np.ndarray, flip: np.ndarray, vflip: np.ndarray, crop: np.ndarray, beyond: float) -> np.ndarray:
        """[C, H, W], mirrored and moved."""
        if flip[0] < self.flip:
            x = x[:, :, ::-1]
        if vflip[0] < self.vflip:
            x = x[:, ::-1]
        if self.crop:
            y0, x0 = (int(u * (2 * self.crop + 1)) for u in crop[:2])
            edges = ((0, 0), (self.crop, self.crop), (self.crop, self.crop))
            around = np.pad(x, edges, constant_values=beyond)
            x = around[:, y0 : y0 + x.shape[1], x0 : x0 + x.shape[2]]
        return x


def _as(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`x` in `dtype`: integers are rounded, and stay in their range."""
    if dtype.kind not in "iu":
        return x.astype(dtype)
    info = np.iinfo(dtype)
    return np.clip(np.rint(x), info.min, info.max).astype(dtype)


def _channels(shape: Sequence[int | None]) -> int | None:
    """The axis of the channels in the shape of a row; None if it is no image."""
    if len(shape) != 3:
        return None
    return next((axis for axis in (0, 2) if shape[axis] in (1, 2, 3, 4)), None)


def uniform(draw: Sequence[int], rows: np.ndarray, count: int) -> np.ndarray:
    """Numbers in [0, 1), [rows, count]: the same for the same `draw` and row."""
    with np.errstate(over="ignore"):
        key = np.zeros((), np.uint64)
        for number in draw:
            key = _mix_bits(key + np.uint64(number % 2**64))
        keys = _mix_bits(key + np.asarray(rows).astype(np.uint64))[:, None]
        return (_mix_bits(keys + np.arange(count, dtype=np.uint64) * np.uint64(_GOLDEN)) >> np.uint64(11)) * 2.0**-53


def _mix_bits(z: np.ndarray) -> np.ndarray:
    """A step of SplitMix64 from the state `z`."""
    z = z + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))
