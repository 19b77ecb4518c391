"""What "auto" comes to, and why it is not the fast backend when it is not."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from busllm.engine.attention.choose import attention_factory, chosen_name
from busllm.engine.attention.torch_attention import TorchAttention
from busllm.engine.cuda_graph import CudaGraphRecorder, recorder_for
from busllm.engine.models.config import read_config
from busllm.errors import MissingPackage
from busllm.testing.random_runner import QWEN3_0_6B

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)  # naming a device needs none
IS_INSTALLED = importlib.util.find_spec("flashinfer") is not None
EXPERTS = {
    **QWEN3_0_6B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def choice(
    name: str = "auto",
    *,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = CUDA,
    has_sinks: bool = False,
) -> tuple[str, str | None]:
    return chosen_name(name, head_dim=head_dim, dtype=dtype, device=device, has_sinks=has_sinks)


def test_on_a_cpu_auto_is_torch_without_a_word() -> None:
    assert choice(device=CPU) == ("torch", None)


def test_on_cuda_auto_is_flashinfer_where_it_is_installed() -> None:
    name, reason = choice()
    assert name == ("flashinfer" if IS_INSTALLED else "torch")
    assert reason is None or "busllm[cuda]" in reason


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"dtype": torch.float32}, "float32"), ({"head_dim": 96}, "96"), ({"has_sinks": True}, "sinks")],
)
def test_on_cuda_auto_is_torch_where_the_kernels_cannot_serve_the_model(limits: dict[str, object], reason: str) -> None:
    name, why = choice(**limits)  # type: ignore[arg-type]
    assert name == "torch" and why is not None and reason in why


def test_a_backend_that_is_named_is_never_replaced() -> None:
    assert choice("flashinfer", device=CPU, head_dim=96) == ("flashinfer", None)
    assert attention_factory("torch") is TorchAttention


@pytest.mark.skipif(IS_INSTALLED, reason="flashinfer is installed")
def test_flashinfer_by_name_says_what_to_install() -> None:
    with pytest.raises(MissingPackage, match=r"busllm\[cuda\]"):
        attention_factory("flashinfer")


def test_steps_are_recorded_on_cuda_for_whole_dense_models() -> None:
    dense, experts = read_config(QWEN3_0_6B), read_config(EXPERTS)
    assert isinstance(recorder_for(dense, CUDA, num_ranks=1), CudaGraphRecorder)
    assert recorder_for(dense, CPU, num_ranks=1) is None
    assert recorder_for(dense, CUDA, num_ranks=2) is None
    assert recorder_for(experts, CUDA, num_ranks=1) is None
