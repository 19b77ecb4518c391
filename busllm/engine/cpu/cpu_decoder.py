"""The compiled forward pass as a decoder: token ids in, hidden states and logits out.

Owns: the packed weights in the form that the kernels take, working memory, the tables of rotation.
Does not know: files, sequences, sampling.
Next on the path: `step.py`; the runner samples from the logits.
"""

from __future__ import annotations

import time

import numba
import numpy as np
import torch

from busllm.engine.attention.protocol import Attention
from busllm.engine.batch import Int64s
from busllm.engine.compiled_scans import CompiledScans
from busllm.engine.cores import BoundThreads
from busllm.engine.cpu.cpu_attention import UNLIMITED, CpuAttention
from busllm.engine.cpu.packed_model import EMBEDDING, HEAD, ROUTERS, PackedModel, matrix_name
from busllm.engine.cpu.row_shares import hidden_states_by_rows, least_shared_rows, share_rows
from busllm.engine.cpu.shapes import GROUP, VECTOR, Array, Batch, Field, Format, Model, Part, Sizes
from busllm.engine.cpu.step import hidden_states, logits
from busllm.engine.cpu.threads import ThreadChoice, num_threads
from busllm.engine.cpu.vectors import INSTRUCTIONS
from busllm.engine.cpu.workspace import expert_size, gate_size, make_mixture, make_workspace
from busllm.engine.layers.rope import Rope
from busllm.engine.models.config import ModelConfig
from busllm.engine.row_scans import RowScans
from busllm.errors import EngineError

_MIN_ROWS = 64
_MIN_POSITIONS = 1024


class CpuDecoder:
    """Computes what `models/decoder.py` describes, by compiled code: the layers, in one or two calls, and the head.

    One step at a time.

    Args:
        config: the model's shape.
        packed: its weights.
        keeps_peaks: records the largest inputs of linears, which takes time.

    Attributes:
        bound_threads: the claim of this host's cores, if the threads were bound.
        least_shared_rows: a step of so many rows is shared by rows, a smaller one by outputs; None = none is by rows.
    """

    def __init__(self, config: ModelConfig, packed: PackedModel, *, keeps_peaks: bool = False) -> None:
        self.config = config
        self.bound_threads: BoundThreads | None = None
        self._packed = packed  # holds the memory that the records below point to
        self._rope = Rope(config.rope, torch.device("cpu"))
        self._sizes = Sizes(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            gate_size=gate_size(config),
            expert_size=expert_size(config),
            normalizes=config.experts is not None and config.experts.normalizes,
            norm_epsilon=config.rms_norm_eps,
        )
        self._model = self._make_model()
        tiles, groups = (self._model.linears[0, :, field] for field in (Field.NUM_TILES, Field.NUM_GROUPS))
        self._row_work = float((tiles * groups).sum()) * VECTOR * GROUP  # multiply-adds of a layer
        self._scans = CompiledScans()
        self._threads = ThreadChoice(num_threads())
        self._num_threads = num_threads()  # of the latest step
        self._keeps_peaks = keeps_peaks
        is_plain = config.experts is None and not keeps_peaks and num_threads() > 1
        self.least_shared_rows = least_shared_rows(num_threads()) if is_plain else None
        self._space = make_workspace(config, _MIN_ROWS, keeps_peaks=keeps_peaks)
        self._mixture = make_mixture(config, _MIN_ROWS)
        self._logits = np.empty((1, int(self._model.head[Field.NUM_TILES]) * VECTOR), dtype=np.float32)

    @property
    def is_recordable(self) -> bool:
        """No: there is no device whose kernels could be recorded."""
        return False

    @property
    def row_scans(self) -> RowScans:
        """Compiled, with the threads of the latest step."""
        return self._scans

    @property
    def label(self) -> str:
        """Instructions and number formats, for people."""
        return f"{INSTRUCTIONS.label}, {self._packed.label}"

    @property
    def num_bytes(self) -> int:
        """Of the packed weights."""
        return self._packed.num_bytes

    @property
    def number_format(self) -> str:
        """What weights are stored in, and states computed in; another one gives other numbers."""
        states = {"bfloat16" if kind is Format.BFLOAT16 else "int8" for kind in self._packed.formats.values()}
        return f"compiled {self._packed.label}, states {'+'.join(sorted(states))}, outliers apart"

    @property
    def peaks(self) -> Array:
        """The largest magnitude of each input of each linear since the working memory grew: see `Workspace.peaks`."""
        return self._space.peaks

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache_slots: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        """Runs all layers over a step's tokens.

        Args:
            token_ids: int64 (num_tokens,).
            positions, cache_slots: int64 (num_tokens,), the ones that `attention` was prepared with.
            attention: a `CpuAttention`, since its layout is compiled into the step.

        Returns:
            float32 (num_tokens, hidden_size), before the last norm.

        Raises:
            EngineError: another attention backend, or a token id beyond the vocabulary.
        """
        if not isinstance(attention, CpuAttention):
            raise EngineError(f"the compiled forward pass cannot use {type(attention).__name__}")
        ids, places = token_ids.numpy(), positions.numpy()
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise EngineError(f"token ids {ids.min()} … {ids.max()} are not below {self.config.vocab_size}")
        num_tokens = len(ids)
        self._reserve(num_tokens, int(places.max()) + 1)
        batch = attention.batch._replace(token_ids=ids, positions=places, cache_slots=cache_slots.numpy())
        if self.least_shared_rows is not None and num_tokens >= self.least_shared_rows:
            self._run_by_rows(batch, attention)
        else:
            self._run_by_outputs(batch, attention)
        # A copy: the head works in the same memory.
        return torch.from_numpy(self._space.states[:num_tokens, : self.config.hidden_size].copy())

    def _run_by_rows(self, batch: Batch, attention: CpuAttention) -> None:
        """Each core takes some rows through all layers."""
        self._num_threads, heads = num_threads(), attention.heads
        numba.set_num_threads(self._num_threads)
        work = (self._row_work, 2.0 * heads.head_dim, int(self._model.windows.max()))
        shares = share_rows(batch.items, batch.positions, self._num_threads, *work)
        cache, batch = attention.cache.arrays, batch._replace(items=shares[0])
        hidden_states_by_rows(self._model, self._sizes, heads, batch, cache, self._space, *shares[1:])

    def _run_by_outputs(self, batch: Batch, attention: CpuAttention) -> None:
        """All cores share each linear; before they do, one may take all rows through the first layers alone."""
        num_rows, num_layers = len(batch.positions), self.config.num_layers
        share = self._threads.choose(num_rows)
        self._num_threads = 1 if share == 1 else num_threads()
        heads, cache = attention.heads, attention.cache.arrays
        alone = int(share * num_layers)
        started = time.perf_counter()
        for first, end, threads in ((0, alone, 1), (alone, num_layers, self._num_threads)):
            if first < end:
                numba.set_num_threads(threads)
                hidden_states(self._model, self._sizes, heads, batch, cache, self._space, self._mixture, first, end)
        self._threads.took(num_rows, share, time.perf_counter() - started)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """(num_rows, hidden_size) → float32 (num_rows, vocab_size), overwritten by the next call."""
        rows = states.shape[0]
        self._reserve(rows, 0)
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._logits.shape[1]), dtype=np.float32)
        self._space.states[:rows, : self.config.hidden_size] = states.numpy()
        self._space.states[:rows, self.config.hidden_size :] = 0  # the padding may be that of a row that is not finite
        numba.set_num_threads(self._num_threads)
        logits(self._model, self._sizes, self._space, rows, self._logits)
        return torch.from_numpy(self._logits[:rows, : self.config.vocab_size])

    def _reserve(self, num_rows: int, num_positions: int) -> None:
        """Makes room for a step."""
        if num_rows > len(self._space.states):
            wanted = max(num_rows, 2 * len(self._space.states))
            self._space = make_workspace(self.config, wanted, keeps_peaks=self._keeps_peaks)
            self._mixture = make_mixture(self.config, wanted)
        have = len(self._model.cosines)
        if num_positions > have:
            wanted = max(num_positions, min(2 * have, self.config.max_context_tokens))
            cosines, sines = self._rotations(wanted)
            self._model = self._model._replace(cosines=cosines, sines=sines)

    def _rotations(self, num_positions: int) -> tuple[Array, Array]:
        cosines, sines = self._rope.angles(torch.arange(num_positions))
        return cosines[:, 0].contiguous().numpy(), sines[:, 0].contiguous().numpy()

    def _make_model(self) -> Model:
        config, packed = self.config, self._packed
        linears = np.stack(
            [[self._linear(matrix_name(layer, part)) for part in Part] for layer in range(config.num_layers)]
        )
        embedding = self._linear(EMBEDDING)
        cosines, sines = self._rotations(_MIN_POSITIONS)
        layers_with_experts = () if config.experts is None else config.experts.layers
        windows = [UNLIMITED if window is None else window for window in config.layer_windows]
        return Model(
            linears=linears,
            embedding=embedding,
            head=self._linear(HEAD) if HEAD in packed.formats else embedding,
            norms=packed.arrays["norms"],
            head_norms=packed.arrays["head_norms"],
            has_experts=np.array([layer in layers_with_experts for layer in range(config.num_layers)]),
            routers=packed.arrays.get(ROUTERS, np.zeros((0, 0, 0), np.float32)),
            windows=np.array(windows, dtype=np.int64),
            cosines=cosines,
            sines=sines,
        )

    def _linear(self, name: str) -> Int64s:
        arrays = self._packed.arrays
        weights, bias, outliers = arrays[f"{name}.weights"], arrays[f"{name}.bias"], arrays.get(f"{name}.outliers")
        channels, num_channels = (0, 0) if outliers is None else (outliers.ctypes.data, len(outliers))
        num_tiles, num_groups = weights.shape[:2]
        kind = self._packed.formats[name]
        fields = (kind, weights.ctypes.data, bias.ctypes.data, num_tiles, num_groups, channels, num_channels)
        return np.array(fields, dtype=np.int64)
