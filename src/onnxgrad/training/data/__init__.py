"""Data for training: sources, their columns, and batches for the inputs of a step."""

from onnxgrad.training.data.augment import Augment
from onnxgrad.training.data.batches import Data
from onnxgrad.training.data.fields import Field, match
from onnxgrad.training.data.images import Images
from onnxgrad.training.data.sources import load_npz, open_data
from onnxgrad.training.data.split import split
from onnxgrad.training.data.text import Text

__all__ = ["Augment", "Data", "Field", "Images", "Text", "load_npz", "match", "open_data", "split"]
