"""Settings of ONNX Runtime for a graph, each of which was measured."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import onnxruntime

from onnxgrad.errors import BadInput
from onnxgrad.keywords import checked_fields, renamed
from onnxgrad.runtime.failures import one_line
from onnxgrad.runtime.kernels import has_kernels, library
from onnxgrad.runtime.passes import NAMES

#: Implementations of named parts of a graph, see `Options`.
TARGETS = ("auto", "portable", "native")

#: The environment variable that replaces "auto".
TARGET = "ONNXGRAD_TARGET"

#: The graph optimizations of ONNX Runtime, by their level.
_LEVELS = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}


@checked_fields
@dataclass(frozen=True)
class Options:
    """Settings of ONNX Runtime for a graph.

    Attributes:
        threads: threads inside an operator; ``None`` leaves it to the runtime (one per physical core).
        spinning: waiting threads spin. Off costs 2-20 % of a step, and spares the other processes.
        arena: memory comes from the runtime's arena. Off costs 1.6-2.9 times the step time, and lowers
            the memory that stays reserved after a peak.
        level: graph optimization: "none", "basic", "extended" or "all"; ``None``: "all" if the graph has a
            Conv with constant weights, whose layout "all" improves, else "extended"; also if the constants take 32 MB
            or more and the graph computes gradients of weights. (Where all weights change, "all" only reorders what
            pooling reads: 5-9 % of the step of a small CNN.) Creating a session of 10,000 nodes takes 2 s with "all"
            and 0.8 s with "none".
        providers: execution providers, in order of preference, each with its settings behind a colon where there are
            any: ``"CUDAExecutionProvider:device_id=1,use_tf32=0"``.
        layout: "auto" gives the CPU provider a copy of the graph with the rewrites of `runtime.rewrites`, which
            may use operators that are ONNX Runtime's own, where a trial in this process gives the right numbers;
            "plain" has the runtime run the operators that are in the graph.
        without: names of passes to leave out, of those that ``onnxgrad passes`` lists.
        pattern: from the second run on, memory comes as one block laid out by what the first run asked for. On
            takes 0-2 % off a step, and holds that block beside what the first run took: 30 to 40 MB for steps of 40.
        reuse: a result takes the memory of an earlier one of its shape, which is then held from the one to the other.
            From the forward to the backward pass that is long: on adds 15 to 50 % to the peak of a step, and no speed.
        denormals: a training step takes denormal numbers as they are. Off, they are zeros (on Linux and x86-64),
            also as gradients: as numbers they take up to a hundred times as long, and decaying moments end as such.
        packed: ONNX Runtime keeps a packed copy of each constant matrix for every product with it. On, products of
            few rows (up to 128) take half the time, and weights two to three times their memory; ``None``: on, except
            for training steps with 256 MB of constants or more.
        profile: where the runtime writes a profile, as the beginning of the name of a file; empty: nowhere.
        target: "portable" runs standard operators alone; "native" has kernels in C in the place of those parts of the
            graph that there is a kernel for, on the CPU (it is refused if the installation has none);
            "auto" is "native" where there are kernels, else "portable". ``ONNXGRAD_TARGET`` may say which.
    """

    threads: int | None = None
    spinning: bool = True
    arena: bool = True
    level: str | None = None
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    layout: str = "auto"
    without: tuple[str, ...] = ()
    pattern: bool = False
    reuse: bool = False
    denormals: bool = False
    packed: bool | None = None
    profile: str = ""
    target: str = "auto"

    def resolve_target(self) -> Options:
        """Replace the target "auto" by ``ONNXGRAD_TARGET``, or by "native" if kernels for it are available."""
        if self.target != "auto":
            return self
        target = os.environ.get(TARGET) or "auto"
        if target not in TARGETS:
            raise BadInput(f"{TARGET} must be 'auto', 'portable' or 'native', not {target!r}")
        if target == "auto":
            target = "native" if self.provider == "CPUExecutionProvider" and has_kernels() else "portable"
        return dataclasses.replace(self, target=target)

    #: the deprecated name of `resolve_target`
    settled = renamed("Options.settled", resolve_target)

    def for_a_plan(self) -> Options:
        """The same for a step within a budget of memory: standard operators, unless a target was named.

        Kernels in C run some parts of a step in another order than was planned, and may exceed the budget.
        """
        return dataclasses.replace(self, target="portable") if self.is_free else self

    @property
    def provider(self) -> str:
        """The name of the first execution provider."""
        return self.provider_names[0]

    @property
    def provider_names(self) -> tuple[str, ...]:
        """The names of the execution providers, without their settings; the CPU's if there are none."""
        return tuple(text.partition(":")[0] for text in self.providers or ("CPUExecutionProvider",))

    @property
    def provider_settings(self) -> list[dict[str, str]]:
        """The settings of each provider, as ONNX Runtime takes them. Raises BadInput for one that has no value."""
        return [_settings_of(text) for text in self.providers or self.provider_names]

    @property
    def is_free(self) -> bool:
        """True if neither the user nor the environment has set the target."""
        return self.target == "auto" and os.environ.get(TARGET) in (None, "", "auto")

    def native(self) -> onnxruntime.SessionOptions:
        """The same as ONNX Runtime wants it."""
        level = _LEVELS.get(self.level or "all")
        if self.threads is not None and self.threads < 1:
            raise BadInput(f"threads must be at least 1, not {self.threads}")
        if self.layout not in ("auto", "plain"):
            raise BadInput(f"layout must be 'auto' or 'plain', not {self.layout!r}")
        if self.target not in TARGETS:
            raise BadInput(f"target must be 'auto', 'portable' or 'native', not {self.target!r}")
        if unknown := [name for name in self.without if name not in NAMES]:
            raise BadInput(f"there is no pass {unknown[0]!r}; there are {', '.join(NAMES)}")
        if level is None:
            raise BadInput(f"level must be one of {', '.join(_LEVELS)}, not {self.level!r}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads or 0
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.enable_cpu_mem_arena = self.arena
        options.enable_mem_pattern = self.pattern
        options.enable_mem_reuse = self.reuse
        options.enable_profiling = bool(self.profile)
        if self.profile:
            options.profile_file_prefix = self.profile
        options.log_severity_level = 4  # errors come back as exceptions; do not print them as well
        # by default, a product with dequantized blocks of 4 bits rounds its other operand to 8 bits
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        if not self.spinning:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if self.target == "native":
            place = library()
            try:
                options.register_custom_ops_library(str(place))
            except Exception as error:
                raise BadInput(f"ONNX Runtime cannot load the kernels in {place}: {one_line(error)}") from error
        return options


def _settings_of(text: str) -> dict[str, str]:
    name, _, said = text.partition(":")
    pairs = [part.partition("=") for part in said.split(",") if part]
    if wrong := [key for key, equals, value in pairs if not (key and equals and value)]:
        raise BadInput(f"{name} has the setting {wrong[0]!r} without a value; write {name}:{wrong[0] or 'name'}=…")
    return {key.strip(): value.strip() for key, _, value in pairs}
