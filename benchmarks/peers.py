"""Other people's kernels, for comparison: imported in one place."""

import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Attention = Callable[[], Tensor]  # a call whose tensors are fixed
Scales = Sequence[Tensor]  # of q, k and v; empty for 16-bit tensors
_DESCALES = ("descale_q", "descale_k", "descale_v")


def flash_attn_4() -> ModuleType:
    """flash-attn-4's module of entry points (`flash_attn.cute.interface`).

    One of its dependencies imports triton, for benchmarks; where that is not installed (it comes
    with torch for GPUs), an empty stand-in does, and only while the import lasts.

    Raises:
        ImportError: flash-attn-4 is not installed: pip install flash-attn-4
    """
    with warnings.catch_warnings():  # of what it imports: not its caller's
        warnings.simplefilter("ignore")
        return _imported("flash_attn.cute.interface")


def _imported(name: str) -> ModuleType:
    if name in sys.modules or importlib.util.find_spec("triton") is not None:
        return importlib.import_module(name)
    import torch._dynamo  # noqa: F401  before the stand-in: it looks into a triton that is there

    triton = types.ModuleType("triton")
    triton.runtime = types.SimpleNamespace(  # type: ignore[attr-defined]
        cache=types.SimpleNamespace(FileCacheManager=object)
    )
    sys.modules["triton"] = triton
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules["triton"]


def flash_attn_3() -> ModuleType:
    """FA3's module of entry points (`flash_attn_interface`), for Hopper.

    Raises:
        ImportError: it is not installed: pip install tokenspeed-fa3
    """
    return importlib.import_module("flash_attn_interface")


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scales: Scales) -> Attention:
    """cuDNN's forward of these tensors (batch, seqlen, heads, d), built once, to call repeatedly.

    In fp8 the descales of `scales` are single numbers. The output is bf16, or, in fp8 on Hopper,
    e4m3 with scale 1, since cuDNN has no other there.

    Raises:
        ImportError: it is not installed: pip install nvidia-cudnn-frontend
    """
    cudnn: Any = importlib.import_module("cudnn")
    types = {
        torch.bfloat16: cudnn.data_type.BFLOAT16,
        torch.float8_e4m3fn: cudnn.data_type.FP8_E4M3,
        torch.float8_e5m2: cudnn.data_type.FP8_E5M2,
    }
    fp32, handle = cudnn.data_type.FLOAT, cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph = cudnn.pygraph(
        io_data_type=types[q.dtype],
        intermediate_data_type=fp32,
        compute_data_type=fp32,
        handle=handle,
    )

    def tensor(x: Tensor, kind: Any) -> Any:
        return graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=kind)

    operands = {name: x.transpose(1, 2) for name, x in (("q", q), ("k", k), ("v", v))}
    bound = {name: (tensor(x, types[q.dtype]), x) for name, x in operands.items()}
    options = {"attn_scale": q.shape[-1] ** -0.5, "use_causal_mask": causal}
    narrow = q.dtype != torch.bfloat16
    if narrow:
        one = torch.ones(1, 1, 1, 1, device=q.device)
        factors = {n: x.reshape(1, 1, 1, 1).float() for n, x in zip(_DESCALES, scales, strict=True)}
        factors |= dict.fromkeys(("descale_s", "scale_s", "scale_o"), one)
        bound |= {name: (tensor(x, fp32), x) for name, x in factors.items()}
    operation = graph.sdpa_fp8 if narrow else graph.sdpa
    o, _, *largest = operation(
        **{name: t for name, (t, _) in bound.items()}, generate_stats=False, **options
    )
    hopper = torch.cuda.get_device_capability(q.device)[0] < 10
    out = torch.empty_like(q, dtype=q.dtype if narrow and hopper else torch.bfloat16)
    seen = out.transpose(1, 2)
    o.set_output(True).set_dim(list(seen.shape)).set_stride(list(seen.stride()))
    o.set_data_type(types[out.dtype])
    pack = {**dict(bound.values()), o: seen}
    for amax in largest:  # of S and of O
        amax.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(fp32)
        pack[amax] = torch.empty(1, 1, 1, 1, device=q.device)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(graph.get_workspace_size(), device=q.device, dtype=torch.uint8)

    def run() -> Tensor:
        graph.execute(pack, workspace, handle=handle)
        return out

    return run
