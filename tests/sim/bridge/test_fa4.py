"""flash-attn-4's forward, unmodified, on CPU tensors."""

import struct

import pytest
import torch

from flash_attn_fp8 import sim

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler, about FA4's arguments

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16

FULL = {"grid": (1, 1, 1), "cluster": (1, 1, 1)}
TWO_CTAS = {"cluster": (2, 1, 1)}

# (name, what to run, what its launches are); the tile is 2 x 128 queries of a head.
CASES = [
    ("e4m3", {"dtype": E4M3}, [FULL]),
    ("split", {"seqlen_q": 128, "head_dim": 64, "num_splits": 3}, [{"grid": (1, 3, 1)}, {}]),
    ("gqa 2 CTA", {"heads": 4, "pack_gqa": True}, [{"grid": (4, 1, 1), **TWO_CTAS}]),
]
SLOW = [
    ("bf16", {}, [FULL]),
    ("e5m2 causal", {"dtype": E5M2, "causal": True}, [FULL]),
    ("paged 128", {"page": 128}, [FULL]),
    ("paged 16", {"page": 16, "dtype": E4M3}, [FULL]),
    ("hd 256", {"head_dim": 256}, [{"grid": (2, 1, 1), **TWO_CTAS}]),
    ("hd 96", {"head_dim": 96}, [FULL]),
    ("decode", {"seqlen_q": 1, "heads": 8, "pack_gqa": True}, [FULL]),
]


def _inputs(dtype=BF16, head_dim=128, seqlen_q=256, heads=1, page=None, **options):
    made = torch.Generator().manual_seed(0)

    def tensor(*shape):
        return torch.randn(*shape, generator=made).to(dtype)

    q = tensor(1, seqlen_q, heads, head_dim)
    k, v = (tensor(*((1024 // page, page) if page else (1, 1024)), 1, head_dim) for _ in "kv")
    if page:
        options["page_table"] = torch.arange(1024 // page, dtype=torch.int32)[None]
    if dtype is not BF16:
        for name in ("q_descale", "k_descale", "v_descale"):
            options[name] = torch.full((1, 1), 0.5)
    return (q, k, v), options


def _pointers(launch):
    """Every aligned word of the parameters that lies in a buffer, by the buffer's name."""
    found = set()
    for blob in launch.params:
        for (word,) in struct.iter_unpack("<Q", blob[: len(blob) // 8 * 8]):
            for buffer in launch.buffers:
                if buffer.address <= word < buffer.address + buffer.nbytes:
                    found.add(buffer.name.split()[0])
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [pytest.param(*case, id=name) for name, *case in CASES]
    + [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, *case in SLOW],
)
def test_forward(fa4, options, expected):
    launches = []
    qkv, arguments = _inputs(**options)
    with sim.device("sm_100a", launches.append, sm_count=4):
        out, lse, *_ = fa4._flash_attn_fwd(*qkv, **arguments, return_lse=True)
        assert out.is_cuda
    assert len(launches) == len(expected)
    for launch, shape in zip(launches, expected, strict=True):
        assert {name: getattr(launch, name) for name in shape} == shape
    first, last = launches[0], launches[-1]
    assert first.block == (512, 1, 1)
    assert first.launch_registers == 128  # 65,536 / 512
    assert first.dynamic_smem > 200 * 1024
    assert {"mQ", "mK", "mV", "mO", "mLSE"} <= _pointers(first)
    assert 128 in map(len, first.params)  # tensor maps
    addresses = {buffer.address for buffer in last.buffers}
    assert {out.data_ptr(), lse.data_ptr()} <= addresses
    if "q_descale" in arguments:
        assert {f"descale_tensors.{x}_descale" for x in "qkv"} <= _pointers(first)
        assert first.buffers[0].name.startswith("mQ e")


@pytest.mark.slow
def test_forward_on_sm_90(fa4):
    launches = []
    qkv, arguments = _inputs()
    with sim.device("sm_90a", launches.append):
        fa4._flash_attn_fwd(*qkv, **arguments, return_lse=True)
    assert launches[0].block == (384, 1, 1)
    assert "wgmma" in launches[0].ptx


def test_real_and_simulated_functions_do_not_meet(fa4):
    cache = fa4._flash_attn_fwd.compile_cache
    before = dict(cache.cache)
    qkv, arguments = _inputs(dtype=E4M3)  # compiled above
    with sim.device("sm_100a", lambda launch: None, sm_count=4):
        assert fa4._flash_attn_fwd.compile_cache is not cache
        fa4._flash_attn_fwd(*qkv, **arguments, return_lse=True)
        assert fa4._flash_attn_fwd.compile_cache.cache
    assert fa4._flash_attn_fwd.compile_cache is cache
    assert cache.cache == before
    assert fa4._get_device_arch.cache_info().currsize == 0  # it was asked on the simulated device
