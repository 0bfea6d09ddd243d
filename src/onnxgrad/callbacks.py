"""All callbacks of a run in one place: ``from onnxgrad.callbacks import EarlyStopping, TensorBoard``."""

from onnxgrad.training.loop.callbacks import AtEnd as AtEnd
from onnxgrad.training.loop.callbacks import Callback as Callback
from onnxgrad.training.loop.callbacks import EarlyStopping as EarlyStopping
from onnxgrad.training.loop.callbacks import KeepBest as KeepBest
from onnxgrad.training.loop.callbacks import Log as Log
from onnxgrad.training.loop.callbacks import Metrics as Metrics
from onnxgrad.training.loop.callbacks import Plateau as Plateau
from onnxgrad.training.loop.callbacks import Pruning as Pruning
from onnxgrad.training.loop.progress_bar import reporter as reporter
from onnxgrad.training.loop.samples import Samples as Samples
from onnxgrad.training.loop.trackers import MLflow as MLflow
from onnxgrad.training.loop.trackers import TensorBoard as TensorBoard
from onnxgrad.training.loop.trackers import Tracker as Tracker
from onnxgrad.training.loop.trackers import WandB as WandB
